#!/bin/sh
# Two lines of ftckpt as two arrays of Slurm, the second when the first is whole. FIRST and THEN are verbs with their
# arguments, as for one machine. On the login node, in the directory of parts.sbatch:
#   FIRST="convert /ckpt/iter_0009000 /work/hf --to safetensors --names hf --only model" \
#   THEN="copy /work/hf s3://bucket/run7/hf" sh parts-then.sh
set -eu
: "${FIRST:?}" "${THEN:?}" "${PARTS:=12}"
export PARTS
ID=$(WORK=$FIRST sbatch --parsable --array="0-$((PARTS - 1))" --export=ALL parts.sbatch)
WORK=$THEN sbatch --parsable --array="0-$((PARTS - 1))" --export=ALL --dependency="afterok:${ID%%;*}" \
    --kill-on-invalid-dep=yes parts.sbatch
