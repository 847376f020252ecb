#!/bin/sh
# One line of ftckpt by what starts processes: pick one. WORK is a verb with its arguments, as for one machine.
: "${WORK:?}" "${LAUNCHER:?srun, torchrun, mpirun or parallel}" "${PARTS:=4}"
# shellcheck disable=SC2086 # the words of the line
case $LAUNCHER in
    srun) srun -n "$PARTS" ftckpt $WORK --part auto --finish-last ;;
    torchrun) torchrun --nproc-per-node="$PARTS" --no-python ftckpt $WORK --part auto --finish-last ;;
    mpirun) mpirun -n "$PARTS" ftckpt $WORK --part auto --finish-last ;;
    parallel) seq 0 $((PARTS - 1)) | parallel -j2 ftckpt $WORK --part "{}/$PARTS" && ftckpt $WORK --finish ;;
esac
