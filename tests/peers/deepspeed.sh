#!/bin/sh
# Make the environment in which DeepSpeed judges, and let it: sh tests/peers/deepspeed.sh FOLDER
# Needs a compiler for nothing: all of DeepSpeed's own kernels are left out.
set -eu
place=${1:?folder of the environment}
if [ ! -x "$place/bin/python" ]; then
    python3 -m venv "$place"
    "$place/bin/pip" install --quiet --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
    "$place/bin/pip" install --quiet numpy safetensors ninja py-cpuinfo psutil 'setuptools<81' wheel
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu \
        "$place/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
fi
FTCKPT_PEER_DEEPSPEED="$place/bin/python" exec python -m pytest \
    tests/peers/test_deepspeed.py tests/peers/test_autoep.py
