"""The keys at the top of a training state, by what lies below them: one table for all formats.

Trainers agree on little but these words. Every format that finds a state under keys reads this
table, so that one state has the same names whichever format it was saved in. A word decides exactly
and never as a prefix. Below a key that is not listed, the content decides (`TrainingTree`,
`find_homes`).

Sources, besides torch's own `get_state_dict`: Lightning (`state_dict`, `optimizer_states`), timm
(`state_dict_ema`), fairseq (`last_optimizer_state`), icefall (`model_avg`), OpenAI's guided
diffusion and lucidrains (`ema`, `ema_model`), CycleGAN and StyleGAN descendants (`netG`, `G_ema`),
HiFi-GAN (`generator`), flax and t5x (`params`, `opt_state`, `target`), cleanrl and stable-baselines
(`policy`, `actor`, `critic`), DINO and MoCo (`student`, `teacher`), OpenNMT (`model`, `generator`).
"""

from __future__ import annotations

from collections.abc import Sequence

# The model as a whole; where several stand side by side, the first in this order is the model.
MODEL: tuple[str, ...] = (
    "model", "state_dict", "model_state_dict", "module", "net", "network", "weights", "params",
    "model_state", "model_weights", "parameters", "model_dict", "net_state_dict", "net_dict",
    "network_state_dict", "module_state_dict", "model_params", "sd", "nets",
)  # fmt: skip
# One of the networks of a training. Alone it is the model; beside others, each keeps its key.
NETWORK: tuple[str, ...] = (
    "generator", "discriminator", "gen", "disc", "netG", "netD", "net_g", "net_d", "G", "D",
    "generator_state_dict", "discriminator_state_dict", "G_state_dict", "D_state_dict",
    "encoder", "decoder", "encoder_state_dict", "decoder_state_dict", "backbone", "unet",
    "policy", "actor", "critic", "policy_net", "value_net", "q_net", "student", "denoiser",
    "policy_state_dict", "actor_state_dict", "critic_state_dict", "student_state_dict",
    "text_encoder", "mpd", "msd",
)  # fmt: skip
OPTIMIZER: tuple[str, ...] = (
    "optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state",
    "optimizers", "optimizer_states", "opt", "opt_state", "opt_state_dict", "optimizer_0",
    "optim_state", "last_optimizer_state", "optim_dict", "optimizer_dict", "optimizers_state_dict",
    "optims",
)  # fmt: skip
AVERAGE: tuple[str, ...] = (
    "ema", "ema_model", "model_ema", "ema_state_dict", "ema_state", "model_ema_state_dict",
    "averaging_state", "ema_params", "state_dict_ema", "model_avg", "avg_model", "averaged_model",
    "model_average", "swa_model", "swa_state_dict", "ema_net", "ema_weights", "ema_generator",
    "g_ema", "G_ema", "netG_ema", "params_ema", "shadow_params", "ema_model_state_dict",
)  # fmt: skip

MODELS = frozenset(MODEL)
NETWORKS = frozenset(NETWORK)
OPTIMIZERS = frozenset(OPTIMIZER)
AVERAGES = frozenset(AVERAGE)
KNOWN = MODELS | NETWORKS | OPTIMIZERS | AVERAGES

# Bytes of a generator's state as a tensor of uint8: c10's CPUGeneratorImplState, and the seed and
# offset of a device.
CPU_GENERATOR, DEVICE_GENERATOR = 5056, 16
_RANDOM = ("rng", "random", "generator", "seed")


def is_generator(name: str, dtype: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor is the state of a random generator, and so never a weight.

    Args:
        name: where it stands, dotted.
        dtype: the name of its element type.
        shape: in elements.
    """
    if dtype != "uint8" or len(shape) != 1:
        return False
    if shape[0] == CPU_GENERATOR:
        return ".quant_state." not in name
    return shape[0] == DEVICE_GENERATOR and any(word in name.lower() for word in _RANDOM)
