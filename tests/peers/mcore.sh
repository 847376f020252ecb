#!/bin/sh
# Make the environment in which megatron-core judges, and let it: sh tests/peers/mcore.sh FOLDER [VERSION]
# What 0.16.1 cannot load is skipped; versions since 0.17 take a python3 of 3.12, and triton.
set -eu
place=${1:?folder of the environment}
if [ ! -x "$place/bin/python" ]; then
    python3 -m venv "$place"
    "$place/bin/pip" install --quiet --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
    "$place/bin/pip" install --quiet numpy safetensors einops psutil pybind11 \
        "megatron-core==${2:-0.16.1}" ${2:+triton}
fi
FTCKPT_PEER_MCORE="$place/bin/python" exec python -m pytest tests/peers/test_mcore.py
