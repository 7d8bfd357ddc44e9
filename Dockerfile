# Two images. By default everything: `trainmedic serve`, `trainmedic agent` and the command line. With
# `--target agent` only what runs on a GPU node, without the server's packages.
#
# BASE_IMAGE may be any image with Python 3.11 or newer and its venv module. Name it by its digest if it comes from a
# registry. Nothing is compiled, so the file builds for amd64 and arm64. It contains no Redis: set TRAINMEDIC_REDIS_URL.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# For a package index of your own.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_CERT
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY requirements/server.txt requirements/agent.txt requirements/supply.txt requirements/
COPY packaging/image-packages packaging/sbom.py packaging/
RUN python3 -m venv /opt/trainmedic \
    && python3 -m venv /opt/supply \
    && /opt/supply/bin/pip install --quiet --no-deps --only-binary :all: --require-hashes --requirement requirements/supply.txt
COPY LICENSE ./
COPY sdk sdk
COPY logs logs
COPY agent agent

FROM build AS build-agent
RUN packaging/image-packages requirements/agent.txt ./sdk ./logs ./agent

FROM build AS build-server
COPY pyproject.toml README.md ./
COPY app app
RUN packaging/image-packages requirements/server.txt ./sdk ./logs ./agent .

FROM ${BASE_IMAGE} AS run
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="Trainmedic" \
      org.opencontainers.image.description="Auto-remediation for LLM-training GPU clusters: server and node agent" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Remove the base's installers.
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/ensurepip /usr/lib/python3*/ensurepip /usr/share/python-wheels \
        /usr/local/lib/python3*/site-packages/pip* /usr/local/lib/python3*/site-packages/setuptools* \
        /usr/local/lib/python3*/site-packages/wheel* \
    # No program in it may change its user.
    && find / -xdev -perm /6000 -type f -exec chmod a-s {} + \
    && echo 'trainmedic:x:10001:' >>/etc/group \
    && echo 'trainmedic:x:10001:10001:Trainmedic:/var/lib/trainmedic:/usr/sbin/nologin' >>/etc/passwd \
    && install -d -o 10001 -g 10001 -m 0750 /var/lib/trainmedic
COPY LICENSE /usr/share/doc/trainmedic/LICENSE
COPY logs/trainmedic_logs/logrules /etc/trainmedic/logrules
ENV PATH=/opt/trainmedic/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 TRAINMEDIC_STATE_DIR=/var/lib/trainmedic
USER 10001:10001
WORKDIR /var/lib/trainmedic
VOLUME /var/lib/trainmedic
EXPOSE 9445
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["/opt/trainmedic/bin/container-health"]
ENTRYPOINT ["/opt/trainmedic/bin/trainmedic"]

FROM run AS agent
LABEL org.opencontainers.image.title="Trainmedic agent" \
      org.opencontainers.image.description="Auto-remediation for LLM-training GPU clusters: node agent"
COPY --from=build-agent /opt/sbom.cdx.json /usr/share/doc/trainmedic/sbom.cdx.json
COPY --from=build-agent /opt/trainmedic /opt/trainmedic
COPY scripts/container-health /opt/trainmedic/bin/container-health
CMD ["agent"]

FROM run AS server
COPY --from=build-server /opt/sbom.cdx.json /usr/share/doc/trainmedic/sbom.cdx.json
COPY --from=build-server /opt/trainmedic /opt/trainmedic
COPY scripts/container-health /opt/trainmedic/bin/container-health
COPY playbooks /etc/trainmedic/playbooks
COPY alert-maps /etc/trainmedic/alert-maps
# The server refuses to listen beyond loopback without tokens (TRAINMEDIC_TOKENS_FILE).
ENV TRAINMEDIC_HOST=0.0.0.0 TRAINMEDIC_PLAYBOOKS=/etc/trainmedic/playbooks
EXPOSE 8080
CMD ["serve"]
