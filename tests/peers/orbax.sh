#!/bin/sh
# Make the environment in which Orbax judges, and let it: sh tests/peers/orbax.sh FOLDER [VERSION]
set -eu
place=${1:?folder of the environment}
version=${2:-0.12.8}
if [ ! -x "$place/bin/python" ]; then
    python3 -m venv "$place"
    "$place/bin/pip" install --quiet "orbax-checkpoint==$version" jax jaxlib tensorstore optax
fi
FTCKPT_PEER_ORBAX="$place/bin/python" exec python -m pytest tests/peers/test_orbax.py
