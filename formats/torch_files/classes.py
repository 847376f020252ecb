"""Classes of torch whose instances real files pickle whole: modules, optimizers, schedulers.

They are data there (a class, its attributes): kept inert like a third party's class, without a
note. Exact names only. Listed from torch 2.13 by `issubclass` of Module, Optimizer, LRScheduler.
"""

from __future__ import annotations

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
