"""The names that any pickle may use: plain containers, and classes that real checkpoints hold.

Exact names only. A function here is what the reader does in place of the real one; a class is
kept inert, and only the note about it is spared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .inert import Ordered, inert, refuse
from .key_collisions import Keys
from .keys import NESTED, check_key


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        refuse("calls codecs.encode for another codec than latin1")
    data = text.encode("latin1")
    if data.startswith(NESTED):
        from .sniff import refuse_inside

        refuse_inside(data)
    return data


def _bytearray(*args: Any) -> bytearray:
    # An int argument would allocate that many bytes.
    if args and isinstance(args[0], str):
        return bytearray(_encode(*args))
    if len(args) > 1 or (args and not isinstance(args[0], (bytes, bytearray))):
        refuse("builds a bytearray from what is not bytes")
    return bytearray(*args)


def _bytes(*args: Any) -> bytes:
    return bytes(_bytearray(*args))


def _container(kind: type) -> Callable[..., Any]:
    def build(*args: Any) -> Any:
        if len(args) > 1 or (args and not isinstance(args[0], (list, tuple, dict, set, frozenset))):
            refuse(f"builds a {kind.__name__} from what holds no items")
        if args and type(args[0]) in (list, tuple):
            keys = []
            if kind in (set, frozenset):
                keys = list(args[0])
            elif issubclass(kind, dict):
                keys = [one[0] for one in args[0] if type(one) in (list, tuple) and one]
            for key in keys:
                check_key(key)
            Keys().check(keys)
        return kind(*args)

    return build


def _complex(real: Any = 0.0, imag: Any = 0.0) -> complex:
    if not isinstance(real, (int, float)) or not isinstance(imag, (int, float)):
        refuse("builds a complex number from what is not a number")
    return complex(real, imag)


# Classes that real checkpoints hold and that say nothing worth a note. Exact names only.
_QUIET = (
    "argparse.Namespace", "types.SimpleNamespace", "signal.Signals", "_io.BytesIO", "io.BytesIO",
    "uuid.UUID", "datetime.timedelta", "datetime.datetime", "datetime.date", "datetime.timezone",
    "decimal.Decimal", "fractions.Fraction", "collections.defaultdict", "collections.deque",
    "collections.Counter", "copyreg._reconstructor", "copy_reg._reconstructor",
    "builtins.object", "__builtin__.object", "builtins.slice", "__builtin__.slice",
    "builtins.range", "__builtin__.xrange", "builtins.int", "__builtin__.int", "__builtin__.long",
    "builtins.float", "__builtin__.float", "builtins.bool", "__builtin__.bool", "builtins.str",
    "__builtin__.str", "__builtin__.unicode",
    "pathlib.Path", "pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib.WindowsPath",
    "pathlib.PureWindowsPath", "pathlib._local.Path", "pathlib._local.PosixPath",
    "pathlib._local.PurePosixPath", "pathlib._local.WindowsPath", "pathlib._local.PureWindowsPath",
    "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
    "numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer",
    "numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType", "numpy.dtypes.Float64DType",
    "numpy.dtypes.Float32DType", "numpy.dtypes.Int64DType", "numpy.dtypes.BoolDType",
    "torch.device", "torch.Tensor", "torch._C.Generator", "torch.torch_version.TorchVersion",
    "torch.nn.parameter.Parameter", "torch.nn.Parameter",
)  # fmt: skip

# What trainers pickle of their own: enums and plain records of settings and state, by module.
_TRAINERS: Mapping[str, str] = {
    "deepspeed.checkpoint.universal_checkpoint": "SubparamShape",
    "deepspeed.runtime.config": "DtypeEnum",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler LossScaleProfile",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config": "OffloadDeviceEnum OffloadStateTypeEnum",
    "deepspeed.runtime.zero.partition_parameters": "ZeroParamStatus ZeroParamType",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "megatron.core.enums": "ModelType Fp8Recipe Fp4Recipe",
    "megatron.core.transformer.enums": (
        "ModelType LayerType AttnType AttnMaskType AttnBackend CudaGraphScope "
        "InferenceCudaGraphScope"
    ),
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreSavePlan",
    "megatron.core.rerun_state_machine": "RerunMode RerunState RerunDiagnostic QuickStats",
    "megatron.model.enums": "ModelType LayerType AttnType AttnMaskType PositionEmbeddingType",
    **{
        f"{package}.{module}": names
        for package in ("lightning.pytorch", "pytorch_lightning")
        for module, names in (
            ("trainer.states", "TrainerStatus TrainerFn RunningStage TrainerState"),
            ("utilities.enums", "GradClipAlgorithmType"),
            ("utilities.parsing", "AttributeDict"),
            ("callbacks.early_stopping", "EarlyStoppingReason"),
            ("callbacks.timer", "Interval"),
        )
    },
    "lightning.fabric.utilities.data": "AttributeDict",
    "lightning_fabric.utilities.data": "AttributeDict",
    "accelerate.state": "PartialState AcceleratorState",
    "accelerate.utils.dataclasses": (
        "DistributedType DDPCommunicationHookType FP8BackendType ComputeEnvironment "
        "DynamoBackend LoggerType PrecisionType RNGType CustomDtype AutocastKwargs "
        "DistributedDataParallelKwargs GradScalerKwargs InitProcessGroupKwargs "
        "DataLoaderConfiguration ProjectConfiguration GradientAccumulationPlugin "
        "TorchDynamoPlugin DeepSpeedPlugin FullyShardedDataParallelPlugin "
        "TorchTensorParallelPlugin MegatronLMPlugin"
    ),
    "transformers.debug_utils": "DebugOption",
    "transformers.integrations.deepspeed": "HfDeepSpeedConfig HfTrainerDeepSpeedConfig",
    "transformers.trainer_callback": "TrainerState TrainerControl",
    "transformers.trainer_pt_utils": "AcceleratorConfig LabelSmoother",
    "transformers.trainer_utils": (
        "IntervalStrategy EvaluationStrategy SaveStrategy HubStrategy SchedulerType FSDPOption "
        "HPSearchBackend"
    ),
    "transformers.training_args": "TrainingArguments OptimizerNames ParallelMode",
    "transformers.training_args_seq2seq": "Seq2SeqTrainingArguments",
    "trl.trainer.dpo_config": "DPOConfig FDivergenceType",
    "trl.trainer.grpo_config": "GRPOConfig",
    "trl.trainer.sft_config": "SFTConfig",
}

BUILTINS: Mapping[str, Any] = {
    "collections.OrderedDict": _container(Ordered),
    "_codecs.encode": _encode,
    "codecs.encode": _encode,
    **{
        f"{module}.{name}": build
        for module in ("builtins", "__builtin__")
        for name, build in (
            ("set", _container(set)),
            ("frozenset", _container(frozenset)),
            ("dict", _container(dict)),
            ("list", _container(list)),
            ("tuple", _container(tuple)),
            ("complex", _complex),
            ("bytearray", _bytearray),
            ("bytes", _bytes),
        )
    },
    **{name: inert(name) for name in _QUIET},
    **{
        f"{module}.{name}": inert(f"{module}.{name}")
        for module, names in _TRAINERS.items()
        for name in names.split()
    },
}
