"""Stand-ins of the functions that a `torch.save` pickle calls to build its tensors.

torch pickles a tensor as a call of a rebuild function on a storage that lies elsewhere in the file.
Here each such function checks its arguments and returns a record.

Sources: `torch/_utils.py` and `torch/_tensor.py` (rebuild functions and their arguments, torch 1.0
to 2.13).

Classes of torch whose instances real files pickle whole: modules, optimizers, schedulers.

They are data there (a class, its attributes): kept inert like a third party's class, without a
note. Exact names only. Listed from torch 2.13 by `issubclass` of Module, Optimizer, LRScheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import CorruptError, UnsafeError
from ftckpt.formats.pickles.inert import Inert, sealed

from .values import Composite, StorageRef, SubclassRef, TensorRef, reach

# torch itself allows 64 dimensions.
_MAX_DIMENSIONS = 64


def wrong_arguments(function: str) -> NoReturn:
    """Refuse a call of `function` that torch cannot have pickled.

    Raises:
        UnsafeError: always (`unsafe-pickle`).
    """
    raise UnsafeError(
        f"a pickle calls {function} with arguments that torch never writes", kind="unsafe-pickle"
    )


def _sizes(values: Any, function: str) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or len(values) > _MAX_DIMENSIONS:
        wrong_arguments(function)
    for value in values:
        if type(value) is not int or value < 0:
            wrong_arguments(function)
    return tuple(values)


def _tensor(
    storage: Any,
    storage_offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    metadata: Any,
    dtype: DType | None,
    function: str,
) -> TensorRef:
    if type(storage) is not StorageRef or type(storage_offset) is not int or storage_offset < 0:
        wrong_arguments(function)
    shape, strides = _sizes(size, function), _sizes(stride, function)
    if len(shape) != len(strides):
        wrong_arguments(function)
    key, stored, numel, _, location, first = storage
    if dtype is None:
        dtype = stored
    elif dtype is not stored:
        itemsize = dtype.itemsize
        numel = numel * stored.itemsize // itemsize
        first = first * stored.itemsize // itemsize
    needed = reach(shape, strides)
    if needed and storage_offset + needed > numel:
        raise CorruptError(
            f"a tensor of shape {list(shape)[:8]} reaches element {storage_offset + needed} of a"
            f" storage of {numel}",
            kind="size-mismatch",
        )
    conj = neg = False
    if metadata:
        if not isinstance(metadata, dict):
            wrong_arguments(function)
        conj, neg = metadata.get("conj") is True, metadata.get("neg") is True
    return TensorRef(
        key,
        first + storage_offset,
        shape,
        strides,
        dtype,
        requires_grad is True,
        conj,
        neg,
        location,
    )


def _rebuild_tensor(storage: Any, storage_offset: Any, size: Any, stride: Any) -> TensorRef:
    return _tensor(storage, storage_offset, size, stride, False, None, None, "_rebuild_tensor")


def _rebuild_tensor_v2(
    storage: Any,
    storage_offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> TensorRef:
    return _tensor(
        storage, storage_offset, size, stride, requires_grad, metadata, None, "_rebuild_tensor_v2"
    )


def _rebuild_tensor_v3(
    storage: Any,
    storage_offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> TensorRef:
    if type(dtype) is not DType or not dtype.itemsize:
        wrong_arguments("_rebuild_tensor_v3")
    return _tensor(
        storage, storage_offset, size, stride, requires_grad, metadata, dtype, "_rebuild_tensor_v3"
    )


def _is_tensor(value: Any) -> bool:
    return type(value) in (TensorRef, Composite, SubclassRef) or isinstance(value, Inert)


def _rebuild_parameter(
    data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None
) -> Any:
    if type(data) is TensorRef:
        return data._replace(requires_grad=requires_grad is True, parameter=True)
    if not _is_tensor(data):
        wrong_arguments("_rebuild_parameter")
    return data


def _rebuild_parameter_with_state(
    data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None
) -> Any:
    """Keep the attributes of a parameter where tensors are among them (bitsandbytes' Params4bit).

    Others (which axis is cut over tensor-parallel ranks) say nothing that is not known otherwise.
    """
    parameter = _rebuild_parameter(data, requires_grad)
    if type(parameter) is not TensorRef or not _holds_tensor(state):
        return parameter
    found = SubclassRef()
    found.type_name, found.base, found.state = "torch.nn.parameter.Parameter", parameter, state
    return found


def _holds_tensor(state: Any) -> bool:
    """Whether a tensor lies anywhere in a value; each container is looked at once."""
    todo, seen = [state], set[int]()
    while todo:
        value = todo.pop()
        if _is_tensor(value):
            return True
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)) and type(value) is not TensorRef:
            todo += value
        elif isinstance(value, Inert):
            todo += [value.args, value.keywords, value.state, value.items]
    return False


def _rebuild_sparse_tensor(layout: Any, data: Any) -> Composite:
    names: tuple[str, ...] = ("indices", "values", "shape", "coalesced")
    if layout != "torch.sparse_coo":
        names = ("compressed_indices", "plain_indices", "values", "shape")
    if type(layout) is not str or type(data) is not tuple or not 3 <= len(data) <= 4:
        wrong_arguments("_rebuild_sparse_tensor")
    return Composite("sparse", {"layout": layout, **dict(zip(names, data, strict=False))})


def _rebuild_qtensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    params: Any,
    grad: Any = False,
    hooks: Any = None,
) -> Composite:
    name = "_rebuild_qtensor"
    values = _tensor(storage, offset, size, stride, grad, None, None, name)
    if type(params) is not tuple or not params:
        wrong_arguments(name)
    scheme = getattr(params[0], "qualname", "") if _is_class(params[0]) else ""
    rest = dict(zip(("scale", "zero_point", "axis"), params[1:], strict=False))
    return Composite("quantized", {"scheme": scheme, "values": values, **rest})


def _rebuild_meta_tensor(
    dtype: Any, size: Any, stride: Any, requires_grad: Any = False
) -> Composite:
    name = "_rebuild_meta_tensor_no_storage"
    if type(dtype) is not DType:
        wrong_arguments(name)
    shape, strides = _sizes(size, name), _sizes(stride, name)
    return Composite("meta", {"dtype": dtype, "shape": shape, "strides": strides})


def _rebuild_nested_tensor(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> Composite:
    parts = {"buffer": buffer, "sizes": sizes, "strides": strides, "offsets": offsets}
    return Composite("nested", parts)


def _rebuild_device_tensor(data: Any, *args: Any) -> Any:
    if not _is_tensor(data):
        wrong_arguments("_rebuild_device_tensor")
    return data


def _rebuild_wrapper_subclass(
    cls: Any,
    dtype: Any,
    size: Any,
    stride: Any,
    storage_offset: Any = 0,
    layout: Any = None,
    device: Any = None,
    requires_grad: Any = False,
) -> Composite:
    name = "_rebuild_wrapper_subclass"
    if type(dtype) is not DType or not _is_class(cls):
        wrong_arguments(name)
    shape, strides = _sizes(size, name), _sizes(stride, name)
    # Its device is not kept: a loader that has none such would fail, and storages say `cpu` too.
    parts = {
        "dtype": dtype, "shape": shape, "strides": strides, "class": cls.qualname,
        "storage_offset": storage_offset, "layout": layout, "requires_grad": requires_grad,
    }  # fmt: skip
    return Composite("wrapper", parts)


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Inert)


_PLAIN = frozenset(("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter"))


def _rebuild_from_type_v2(func: Any, new_type: Any, args: Any, state: Any = None) -> Any:
    name = "_rebuild_from_type_v2"
    known = isinstance(func, type) and func in _REBUILDERS
    if type(args) is not tuple or not _is_class(new_type) or not (known or _is_class(func)):
        wrong_arguments(name)
    base = func(*args)  # a record class: refuses what must not be called
    if new_type.qualname in _PLAIN:
        return base  # a tensor with Python attributes, which hold no weights
    found = SubclassRef()
    found.type_name, found.base, found.state = new_type.qualname, base, state
    return found


def _get_layout(name: Any) -> str:
    if type(name) is not str:
        wrong_arguments("_get_layout")
    return name


BUILDERS: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter_with_state,
    "torch._utils._rebuild_sparse_tensor": _rebuild_sparse_tensor,
    "torch._utils._rebuild_sparse_csr_tensor": _rebuild_sparse_tensor,
    "torch._utils._rebuild_qtensor": _rebuild_qtensor,
    "torch._utils._rebuild_meta_tensor_no_storage": _rebuild_meta_tensor,
    "torch._utils._rebuild_nested_tensor": _rebuild_nested_tensor,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _rebuild_device_tensor,
    "torch._utils._rebuild_device_tensor_from_numpy": _rebuild_device_tensor,
    "torch._utils._rebuild_xla_tensor": _rebuild_device_tensor,
    "torch._utils._rebuild_wrapper_subclass": _rebuild_wrapper_subclass,
    "torch._tensor._rebuild_from_type": _rebuild_from_type_v2,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type_v2,
    "torch.serialization._get_layout": _get_layout,
}
_REBUILDERS = frozenset(
    sealed(build) for name, build in BUILDERS.items() if "_rebuild_from_type" not in name
)


_NAMES = {
    "torch.ao.nn.qat.modules.linear": ("Linear"),
    "torch.nn.modules.activation": (
        "CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid "
        "LogSoftmax Mish MultiheadAttention PReLU RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax "
        "Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold"
    ),
    "torch.nn.modules.adaptive": ("AdaptiveLogSoftmaxWithLoss"),
    "torch.nn.modules.batchnorm": (
        "BatchNorm1d BatchNorm2d BatchNorm3d LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d "
        "SyncBatchNorm _BatchNorm _LazyNormBase _NormBase"
    ),
    "torch.nn.modules.channelshuffle": ("ChannelShuffle"),
    "torch.nn.modules.container": (
        "Container ModuleDict ModuleList ParameterDict ParameterList Sequential"
    ),
    "torch.nn.modules.conv": (
        "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d LazyConv1d "
        "LazyConv2d LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d "
        "_ConvNd _ConvTransposeMixin _ConvTransposeNd"
    ),
    "torch.nn.modules.distance": ("CosineSimilarity PairwiseDistance"),
    "torch.nn.modules.dropout": (
        "AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout _DropoutNd"
    ),
    "torch.nn.modules.flatten": ("Flatten Unflatten"),
    "torch.nn.modules.fold": ("Fold Unfold"),
    "torch.nn.modules.instancenorm": (
        "InstanceNorm1d InstanceNorm2d InstanceNorm3d LazyInstanceNorm1d LazyInstanceNorm2d "
        "LazyInstanceNorm3d _InstanceNorm"
    ),
    "torch.nn.modules.linear": (
        "Bilinear Identity LazyLinear Linear NonDynamicallyQuantizableLinear"
    ),
    "torch.nn.modules.loss": (
        "BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss GaussianNLLLoss "
        "HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss LinearCrossEntropyLoss MSELoss "
        "MarginRankingLoss MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss "
        "NLLLoss2d PoissonNLLLoss SmoothL1Loss SoftMarginLoss TripletMarginLoss "
        "TripletMarginWithDistanceLoss _Loss _WeightedLoss"
    ),
    "torch.nn.modules.module": ("Module"),
    "torch.nn.modules.normalization": (
        "CrossMapLRN2d GroupNorm LayerNorm LocalResponseNorm RMSNorm"
    ),
    "torch.nn.modules.padding": (
        "CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d "
        "ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d "
        "ReplicationPad3d ZeroPad1d ZeroPad2d ZeroPad3d _CircularPadNd _ConstantPadNd "
        "_ReflectionPadNd _ReplicationPadNd"
    ),
    "torch.nn.modules.pixelshuffle": ("PixelShuffle PixelUnshuffle"),
    "torch.nn.modules.pooling": (
        "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d "
        "AdaptiveMaxPool2d AdaptiveMaxPool3d AvgPool1d AvgPool2d AvgPool3d FractionalMaxPool2d "
        "FractionalMaxPool3d LPPool1d LPPool2d LPPool3d MaxPool1d MaxPool2d MaxPool3d "
        "MaxUnpool1d MaxUnpool2d MaxUnpool3d _AdaptiveAvgPoolNd _AdaptiveMaxPoolNd _AvgPoolNd "
        "_LPPoolNd _MaxPoolNd _MaxUnpoolNd"
    ),
    "torch.nn.modules.rnn": ("GRU GRUCell LSTM LSTMCell RNN RNNBase RNNCell RNNCellBase"),
    "torch.nn.modules.sparse": ("Embedding EmbeddingBag"),
    "torch.nn.modules.transformer": (
        "Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder "
        "TransformerEncoderLayer"
    ),
    "torch.nn.modules.upsampling": ("Upsample UpsamplingBilinear2d UpsamplingNearest2d"),
    "torch.nn.parallel.data_parallel": ("DataParallel"),
    "torch.nn.parallel.distributed": ("DistributedDataParallel"),
    "torch.nn.utils.parametrize": ("ParametrizationList"),
    "torch.optim.adadelta": ("Adadelta"),
    "torch.optim.adagrad": ("Adagrad"),
    "torch.optim.adam": ("Adam"),
    "torch.optim.adamax": ("Adamax"),
    "torch.optim.adamw": ("AdamW"),
    "torch.optim.asgd": ("ASGD"),
    "torch.optim.lbfgs": ("LBFGS"),
    "torch.optim.lr_scheduler": (
        "ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR "
        "ExponentialLR LRScheduler LambdaLR LinearLR MultiStepLR MultiplicativeLR OneCycleLR "
        "PolynomialLR ReduceLROnPlateau SequentialLR StepLR _LRScheduler"
    ),
    "torch.optim.nadam": ("NAdam"),
    "torch.optim.optimizer": ("Optimizer _RequiredParameter"),
    "torch.optim.radam": ("RAdam"),
    "torch.optim.rmsprop": ("RMSprop"),
    "torch.optim.rprop": ("Rprop"),
    "torch.optim.sgd": ("SGD"),
    "torch.optim.sparse_adam": ("SparseAdam"),
    "torch.optim.swa_utils": ("AveragedModel SWALR"),
}
CLASSES: tuple[str, ...] = (
    *(f"{module}.{name}" for module, names in _NAMES.items() for name in names.split()),
    "torch.optim.lr_scheduler._LRScheduler",  # before torch 2.0
    "torch.optim.optimizer._RequiredParameter",
    "torch.cuda.amp.grad_scaler.GradScaler",
    "torch.amp.grad_scaler.GradScaler",
    "torch.cuda.amp.grad_scaler.OptState",
    "torch.amp.grad_scaler.OptState",
)
