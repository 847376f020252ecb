#!/bin/sh
# Make the environment in which megatron-core judges, and let it: sh tests/peers/mcore.sh FOLDER
set -eu
place=${1:?folder of the environment}
if [ ! -x "$place/bin/python" ]; then
    python3 -m venv "$place"
    "$place/bin/pip" install --quiet --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
    "$place/bin/pip" install --quiet numpy safetensors einops psutil pybind11 megatron-core==0.16.1
fi
FTCKPT_PEER_MCORE="$place/bin/python" exec python -m pytest tests/peers/test_mcore.py
