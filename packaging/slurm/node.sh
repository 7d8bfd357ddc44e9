# Functions of the scripts in this directory, which Slurm runs as root on its nodes. docs/how-to/slurm.md says how they
# are installed. Slurm clears the environment, so the settings are in a file named "settings" beside this one.
set -u

TRAINMEDIC=/opt/trainmedic/bin/trainmedic
GPUS=1 # GPUs that must respond
AGENT_STATE= # the agent's state directory: compare with its record of this node
CHECK_SECONDS=30 # Slurm kills a health check after 60 s
ASK_SECONDS=10 # for each of at most two calls of scontrol
ALERTMANAGER_URL= # such as http://alertmanager:9093; empty: jobs that fail are only logged
STATE_DIR=/run/trainmedic-slurm
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# shellcheck disable=SC1091
[ ! -r "$directory/settings" ] || . "$directory/settings"
[ -z "${SLURM_CONF:-}" ] || export SLURM_CONF # slurmd passes it to the epilog and prolog, not to the health check

OURS="trainmedic:health" # beginning of the reason of a drain by these scripts

note() {
    logger -t trainmedic-slurm -- "$*" 2>/dev/null || echo "$*" >&2
}

# Check the node. Return 0 if a check failed, with the first fault in $found, 1 if none has, 2 if the check cannot run.
is_faulty() {
    answer=$(timeout -k 5 "$CHECK_SECONDS" "$TRAINMEDIC" agent health --gpus "$GPUS" \
        ${AGENT_STATE:+--state-dir "$AGENT_STATE"} 2>&1)
    status=$?
    found=$(printf '%s\n' "$answer" | sed -n 's/^Fault: //p' | head -n 1 | cut -c -180)
    case $status in
    0) return 1 ;;
    124 | 137) found="the health check did not end in $CHECK_SECONDS s" ;;
    *)
        [ -n "$found" ] && return 0
        note "the health check cannot run (status $status): $answer"
        return 2
        ;;
    esac
}

# Read the node's $state and $reason. Return 1 if slurmctld does not answer.
ask() {
    shown=$(timeout "$ASK_SECONDS" scontrol show node "$SLURMD_NODENAME" 2>/dev/null) || return 1
    state=$(printf '%s\n' "$shown" | sed -n 's/^ *State=\([^ ]*\).*/\1/p')
    reason=$(printf '%s\n' "$shown" | sed -n 's/^ *Reason=\(.*\) \[[^]]*@[^]]*\]$/\1/p')
}

# Return whether Slurm starts no new job on the node. Release 24.11 keeps the reason of a drain that has ended.
is_out() {
    case $state in
    *DRAIN* | DOWN* | *FAIL*) return 0 ;;
    *) return 1 ;;
    esac
}

is_drained_by_us() {
    case $state:$reason in
    *DRAIN*:"$OURS "*) return 0 ;;
    *) return 1 ;;
    esac
}

# Set a drain whose reason begins with $OURS.
drain() {
    note "draining $SLURMD_NODENAME: $1"
    timeout "$ASK_SECONDS" scontrol update "nodename=$SLURMD_NODENAME" state=drain "reason=$OURS $1"
}

# For a script that fails next: drain the node because of $found. If that is impossible, leave a mark. Slurm then drains
# the node with a reason of its own, which the health check replaces.
drain_before_failure() {
    if ! ask || { ! is_out && ! drain "$found"; }; then
        mkdir -p "$STATE_DIR" && : >"$STATE_DIR/failed"
    fi
}

end_drain() {
    note "ending the drain of $SLURMD_NODENAME: its health check passes"
    timeout "$ASK_SECONDS" scontrol update "nodename=$SLURMD_NODENAME" state=undrain
}
