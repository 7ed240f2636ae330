#!/bin/bash
# Submits the scripts of examples/slurm to a Slurm cluster of three nodes, which are network namespaces of this machine.
# In the elastic run a rank dies and is started again, and the job is then stopped.
#
#   slurm_check.sh BUILD      needs root, iproute2, and Debian's packages slurm-wlm and munge
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$(realpath "$1")
folder=$(mktemp -d /tmp/tessera-slurm-XXXXXX)
chmod 711 "$folder"  # munged requires that clients can reach its socket
space=tessera$$
nodes="n1 n2 n3"
export SLURM_CONF=$folder/slurm.conf OMP_NUM_THREADS=1

fail() {
  echo "slurm-check: $*" >&2
  tail -n 20 "$folder"/{controller,local,step,elastic}.log 2>/dev/null >&2
  exit 1
}

# Runs a command on a node, or on the host "control".
on() {
  nsenter --net="/run/netns/$space$1" unshare --uts --mount sh -c \
    'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"' sh "$1" "$folder/hosts" "${@:2}"
}

end() {
  on control scancel --quiet --user="$(id -un)" 2>/dev/null || true
  for file in "$folder"/*.pid; do kill "$(cat "$file")" 2>/dev/null || true; done
  for name in $nodes control; do ip netns del "$space$name" 2>/dev/null || true; done
  rm -rf "$folder"
}

make_hosts() {
  ip netns add "${space}control"
  ip -n "${space}control" link add bridge type bridge
  ip -n "${space}control" addr add 10.78.0.100/24 dev bridge
  ip -n "${space}control" link set lo up
  ip -n "${space}control" link set bridge up
  printf '127.0.0.1 localhost\n10.78.0.100 control\n' >"$folder/hosts"
  for name in $nodes; do
    local address=10.78.0.${name#n}
    echo "$address $name" >>"$folder/hosts"
    ip netns add "$space$name"
    ip link add eth0 netns "$space$name" type veth peer name "$name" netns "${space}control"
    ip -n "$space$name" addr add "$address/24" dev eth0
    ip -n "$space$name" link set lo up
    ip -n "$space$name" link set eth0 up
    ip -n "${space}control" link set "$name" master bridge
    ip -n "${space}control" link set "$name" up
  done
}

start_slurm() {
  cat >"$SLURM_CONF" <<EOF
ClusterName=tessera
SlurmctldHost=control
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmctldPidFile=$folder/controller.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/controller.log
SlurmdLogFile=$folder/%n.log
SlurmdSpoolDir=$folder/spool-%n
StateSaveLocation=$folder/state
NodeName=n[1-3] CPUs=64 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES OverSubscribe=YES
EOF
  (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
  munged --force --socket "$folder/munge.socket" --key-file "$folder/munge.key" --pid-file "$folder/munged.pid" \
    --log-file "$folder/munged.log" --seed-file "$folder/munged.seed"
  mkdir "$folder/state"
  on control slurmctld
  for name in $nodes; do on "$name" slurmd; done
}

# Waits up to a minute for a text in a file.
wait_for() {
  for ((i = 0; i < 600; i++)); do
    if grep -qs "$2" "$1"; then return; fi
    sleep 0.1
  done
  fail "no \"$2\" in $1 after a minute"
}

for program in ip nsenter munged slurmctld slurmd; do
  command -v "$program" >/dev/null || fail "needs $program (Debian: iproute2, util-linux, slurm-wlm, munge)"
done
trap end EXIT
make_hosts
start_slurm

# Submits a script as it is, but for a smaller model, two tasks a node and the folder of its output.
small=(--layers 1 --width 32 --heads 2 --context 32 --batch 2 --sample 0)
submit() {
  sed -e "s|--layers 12.*--steps 1000|${small[*]} --steps $3|" -e "s|build/release|$build|" \
    -e "s|out/train_gpt-[^ \"]*|$folder/$2|" -e 's/--ntasks-per-node=4/--ntasks-per-node=2/; s/--cpus-per-task=8/--cpus-per-task=1/' "examples/slurm/$1" \
    >"$folder/$1"
  on control sbatch --parsable --output="$folder/$2.log" "${@:4}" "$folder/$1"
}

losses() { grep -o '"loss":[^,]*' "$folder/$1/metrics.jsonl"; }
"$build/examples/train_gpt" --ranks 4 "${small[@]}" --steps 10 --out "$folder/local" >"$folder/local.log"
submit train_gpt.sbatch step 10 --wait >/dev/null || fail "train_gpt.sbatch failed"
[ "$(losses local)" = "$(losses step)" ] || fail "the losses of srun are not those of --ranks 4"

job=$(submit train_gpt_elastic.sbatch elastic 1000000)
metrics=$folder/elastic/metrics.jsonl
wait_for "$metrics" '"step":50,'
for pid in $(ip netns pids "${space}n2"); do
  if [[ $(readlink "/proc/$pid/exe") == */train_gpt ]]; then kill -KILL "$pid"; fi
done
wait_for "$metrics" '"event":"joined"'
on control scancel --signal=USR1 "$job"
wait_for "$folder/elastic.log" 'stopped by signal 10'
for ((i = 0; i < 100; i++)); do
  state=$(on control scontrol show job "$job" | grep -oE 'JobState=\w+|ExitCode=[0-9]+' | tr '\n' ' ')
  [[ $state == *RUNNING* || $state == *COMPLETING* ]] || break
  sleep 0.1
done
[[ $state == *ExitCode=138* ]] || fail "the stopped job has $state, expected ExitCode=138"
ls "$folder"/elastic/checkpoints/step-*/ >/dev/null || fail "the stopped job has saved no checkpoint"
echo "slurm-check: passed"
