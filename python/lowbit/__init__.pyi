# SPDX-License-Identifier: Apache-2.0
"""The public names of lowbit, and where each of them lives: type checkers read it, and `lowbit.__getattr__`."""

from lowbit import (
    attention as attention,
    autotune as autotune,
    backends as backends,
    checkpoints as checkpoints,
    devices as devices,
    export as export,
    formats as formats,
    models as models,
    optim as optim,
    peers as peers,
    quant as quant,
    recorder as recorder,
    testing as testing,
    training as training,
)
from lowbit.attention.block_mask import (
    BlockMask as BlockMask,
    and_masks as and_masks,
    create_block_mask as create_block_mask,
    create_mask as create_mask,
    noop_mask as noop_mask,
    or_masks as or_masks,
)
from lowbit.attention.flex import (
    AuxOutput as AuxOutput,
    AuxRequest as AuxRequest,
    flex_attention as flex_attention,
)
from lowbit.attention.kv_cache import QuantizedKVCache as QuantizedKVCache
from lowbit.attention.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
from lowbit.autotune import (
    Plan as Plan,
    autoquant as autoquant,
)
from lowbit.compile.blocks import compile_blocks as compile_blocks
from lowbit.compile.c_shims import c_shim_options as c_shim_options
from lowbit.compile.options import compile_options as compile_options
from lowbit.devices.warmup import warmup as warmup
from lowbit.diagnostics.compare import (
    Comparison as Comparison,
    compare_checkpoints as compare_checkpoints,
)
from lowbit.diagnostics.explain import explain as explain
from lowbit.diagnostics.info import info as info
from lowbit.diagnostics.kernels import (
    force_kernel as force_kernel,
    kernels as kernels,
)
from lowbit.formats import (
    GPTQ as GPTQ,
    HQQ as HQQ,
    BlockSparseWeightConfig as BlockSparseWeightConfig,
    Float8DynamicActivationFloat8WeightConfig as Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig as Float8WeightOnlyConfig,
    FloatWeightConfig as FloatWeightConfig,
    FP4WeightOnlyConfig as FP4WeightOnlyConfig,
    Int4WeightOnlyConfig as Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig as Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationInt8SemiSparseWeightConfig as Int8DynamicActivationInt8SemiSparseWeightConfig,
    Int8DynamicActivationInt8WeightConfig as Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig as Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig as Int8WeightOnlyConfig,
    IntxWeightOnlyConfig as IntxWeightOnlyConfig,
    MappingType as MappingType,
    NF4WeightOnlyConfig as NF4WeightOnlyConfig,
    PerAxis as PerAxis,
    PerGroup as PerGroup,
    PerRow as PerRow,
    PerToken as PerToken,
    SemiSparseWeightConfig as SemiSparseWeightConfig,
    block_sparse_weight as block_sparse_weight,
    float8_dynamic_activation_float8_weight as float8_dynamic_activation_float8_weight,
    float8_weight_only as float8_weight_only,
    float_weight as float_weight,
    fp4_weight_only as fp4_weight_only,
    int4_weight_only as int4_weight_only,
    int8_dynamic_activation_int4_weight as int8_dynamic_activation_int4_weight,
    int8_dynamic_activation_int8_semi_sparse_weight as int8_dynamic_activation_int8_semi_sparse_weight,
    int8_dynamic_activation_int8_weight as int8_dynamic_activation_int8_weight,
    int8_dynamic_activation_intx_weight as int8_dynamic_activation_intx_weight,
    int8_weight_only as int8_weight_only,
    intx_weight_only as intx_weight_only,
    nf4_weight_only as nf4_weight_only,
    semi_sparse_weight as semi_sparse_weight,
)
from lowbit.huggingface.cache_file import load_cache as load_cache, save_cache as save_cache
from lowbit.huggingface.load_gguf import load_gguf as load_gguf
from lowbit.huggingface.load_gguf_adapter import load_gguf_adapter as load_gguf_adapter
from lowbit.huggingface.lowbit_config import LowbitConfig as LowbitConfig
from lowbit.huggingface.quantize_checkpoint import quantize_checkpoint as quantize_checkpoint
from lowbit.huggingface.save import save as save
from lowbit.huggingface.trainer_optimizer import trainer_optimizer as trainer_optimizer
from lowbit.models.croppable_cache import croppable_cache as croppable_cache, rewind_cache as rewind_cache
from lowbit.models.fuse import fuse as fuse
from lowbit.models.fused_loss import fuse_loss as fuse_loss
from lowbit.models.quantized_cache import QuantizedCache as QuantizedCache
from lowbit.models.rotate import rotate_ as rotate_
from lowbit.models.smooth import smooth_ as smooth_
from lowbit.ops.causal_conv1d import causal_conv1d as causal_conv1d
from lowbit.ops.gated_delta_rule import gated_delta_rule as gated_delta_rule
from lowbit.ops.gated_rms_norm import gated_rms_norm as gated_rms_norm
from lowbit.ops.route import route as route
from lowbit.ops.sample import sample as sample
from lowbit.ops.selective_scan import selective_scan as selective_scan
from lowbit.ops.ssd import ssd as ssd
from lowbit.quant import (
    BlockSparseLinear as BlockSparseLinear,
    Calibration as Calibration,
    MergeReport as MergeReport,
    QuantEmbedding as QuantEmbedding,
    QuantExperts as QuantExperts,
    QuantizationReport as QuantizationReport,
    QuantLinear as QuantLinear,
    calibrate as calibrate,
    dequantize_ as dequantize_,
    fuse_gated_mlps as fuse_gated_mlps,
    load as load,
    merging as merging,
    quantize_ as quantize_,
    sparsify_ as sparsify_,
)
from lowbit.quant.functional import (
    experts as experts,
    gather_linear as gather_linear,
    linear as linear,
    linear_cross_entropy as linear_cross_entropy,
)
from lowbit.quant.linear_kl_div import linear_kl_div as linear_kl_div
from lowbit.recorder.profile import profile as profile

__version__: str
