// SPDX-License-Identifier: Apache-2.0
// oneDNN's C API as far as it is called, declared here so that building needs no header of it. Names and numbers are
// those of oneapi/dnnl/dnnl_types.h of version 3, whose binary interface holds for all of 3.x.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lowbit::onednn {

// Handles are opaque; each has a type of its own here, so that one cannot stand for another.
using Engine = struct EngineHandle*;
using Stream = struct StreamHandle*;
using Primitive = struct PrimitiveHandle*;
using PrimitiveDesc = struct PrimitiveDescHandle*;
using Attributes = struct AttributesHandle*;
using PostOps = struct PostOpsHandle*;
using Memory = struct MemoryHandle*;
using MemoryDesc = struct MemoryDescHandle*;

struct Argument {
  int which;
  Memory memory;
};

struct Version {
  int major, minor, patch;
  const char* hash;
  unsigned cpu_runtime, gpu_runtime;
};

constexpr int kCpu = 1, kInOrder = 1, kUserScratchpad = 1;
constexpr int kStrictMath = 0, kBFloat16Math = 1, kFloat16Math = 2;               // dnnl_fpmath_mode_t
constexpr int kOutOfMemory = 1, kUnimplemented = 3;                             // dnnl_status_t
constexpr int kFloat16 = 1, kBFloat16 = 2, kFloat32 = 3, kInt32 = 4, kInt8 = 5;             // dnnl_data_type_t
constexpr int kAnyFormat = 1, kPanels16a16b2a = 381, kPanels16a16b = 503;       // dnnl_format_tag_t
constexpr int kGeluTanh = 43, kSwish = 44;                                      // dnnl_alg_kind_t
constexpr int kBinaryAdd = 131056, kBinaryMul = 131057;
constexpr int kQueryImplementation = 8, kQueryInnerCount = 263, kQueryInnerBlocks = 264, kQueryInnerDims = 265;
constexpr int kQueryWeights = 131, kQueryScratchpad = 136;                      // dnnl_query_t
constexpr int kSource = 1, kDestination = 17, kWeights = 33, kScratchpad = 80;  // DNNL_ARG_*
constexpr int kScalesOfWeights = 4096 | kWeights;
constexpr int argument_of_post_op(int i) { return 32768 * (i + 1) | 2; }        // its second operand

constexpr unsigned kSequential = 1, kOpenMP = 2, kTbb = 4, kThreadPool = 8, kSycl = 512;  // dnnl_version_t::cpu_runtime

// X(name, symbol, parameters ...): all return a dnnl_status_t, 0 for success.
#define LOWBIT_ONEDNN_FUNCTIONS(X)                                                                                    \
  X(engine_create, "dnnl_engine_create", Engine*, int kind, std::size_t index)                                        \
  X(stream_create, "dnnl_stream_create", Stream*, Engine, unsigned flags)                                             \
  X(stream_wait, "dnnl_stream_wait", Stream)                                                                          \
  X(stream_destroy, "dnnl_stream_destroy", Stream)                                                                    \
  X(strided_desc, "dnnl_memory_desc_create_with_strides", MemoryDesc*, int, const int64_t*, int, const int64_t*)      \
  X(tagged_desc, "dnnl_memory_desc_create_with_tag", MemoryDesc*, int, const int64_t*, int, int tag)                  \
  X(desc_query, "dnnl_memory_desc_query", const MemoryDescHandle*, int what, void*)                                   \
  X(desc_clone, "dnnl_memory_desc_clone", MemoryDesc*, const MemoryDescHandle*)                                       \
  X(desc_destroy, "dnnl_memory_desc_destroy", MemoryDesc)                                                             \
  X(memory_create, "dnnl_memory_create", Memory*, const MemoryDescHandle*, Engine, void*)                             \
  X(memory_destroy, "dnnl_memory_destroy", Memory)                                                                    \
  X(post_ops_create, "dnnl_post_ops_create", PostOps*)                                                                \
  X(post_ops_destroy, "dnnl_post_ops_destroy", PostOps)                                                               \
  X(append_eltwise, "dnnl_post_ops_append_eltwise", PostOps, int algorithm, float alpha, float beta)                  \
  X(append_binary, "dnnl_post_ops_append_binary", PostOps, int algorithm, const MemoryDescHandle*)                    \
  X(attr_create, "dnnl_primitive_attr_create", Attributes*)                                                           \
  X(attr_destroy, "dnnl_primitive_attr_destroy", Attributes)                                                          \
  X(set_scratchpad, "dnnl_primitive_attr_set_scratchpad_mode", Attributes, int)                                       \
  X(set_math, "dnnl_primitive_attr_set_fpmath_mode", Attributes, int)                                                 \
  X(set_post_ops, "dnnl_primitive_attr_set_post_ops", Attributes, const PostOpsHandle*)                               \
  X(matmul, "dnnl_matmul_primitive_desc_create", PrimitiveDesc*, Engine, const MemoryDescHandle*,                     \
    const MemoryDescHandle*, const MemoryDescHandle*, const MemoryDescHandle*, const AttributesHandle*)               \
  X(reorder, "dnnl_reorder_primitive_desc_create", PrimitiveDesc*, const MemoryDescHandle*, Engine,                   \
    const MemoryDescHandle*, Engine, const AttributesHandle*)                                                         \
  X(query, "dnnl_primitive_desc_query", const PrimitiveDescHandle*, int what, int index, void*)                       \
  X(primitive_desc_destroy, "dnnl_primitive_desc_destroy", PrimitiveDesc)                                             \
  X(primitive_create, "dnnl_primitive_create", Primitive*, const PrimitiveDescHandle*)                                \
  X(primitive_destroy, "dnnl_primitive_destroy", Primitive)                                                           \
  X(execute, "dnnl_primitive_execute", const PrimitiveHandle*, Stream, int count, const Argument*)

// Of later versions: null where the library has not got one.
#define LOWBIT_ONEDNN_LATER_FUNCTIONS(X)                                                                              \
  X(set_math_of_codes, "dnnl_primitive_attr_set_fpmath_mode_v2", Attributes, int mode, int apply_to_codes)            \
  X(set_scales, "dnnl_primitive_attr_set_scales", Attributes, int argument, int mask, int dimensions,                 \
    const int64_t* group, int type)                                                                                   \
  X(gpu_engine, "dnnl_ze_interop_engine_create", Engine*, void* driver, void* device, void* context)           \
  X(gpu_memory, "dnnl_ze_interop_memory_create", Memory*, const MemoryDescHandle*, Engine, int count,          \
    void** handles)

// The graph API, as far as a partition of attention needs it: names and numbers of oneapi/dnnl/dnnl_graph_types.h. Null
// in builds without it.
using Graph = struct GraphHandle*;
using GraphOp = struct GraphOpHandle*;
using Partition = struct PartitionHandle*;
using CompiledPartition = struct CompiledPartitionHandle*;
using GraphTensor = struct GraphTensorHandle*;

constexpr int kMostDims = 12;
struct LogicalTensor {
  std::size_t id;
  int rank;
  int64_t dims[kMostDims];
  int type, property, layout;
  int64_t strides[kMostDims];
};
constexpr int kStridedLayout = 2, kVariable = 1, kFusion = 1;
constexpr int kGraphAdd = 2, kGraphMatmul = 39, kGraphMultiply = 46, kGraphSoftmax = 64;  // dnnl_graph_op_kind_t
constexpr int kAttributeAxis = 0x30, kAttributeTransposeB = 0x66, kAttributeMode = 0x84;   // dnnl_graph_op_attr_t

#define LOWBIT_ONEDNN_GRAPH_FUNCTIONS(X)                                                                             \
  X(graph_create, "dnnl_graph_graph_create", Graph*, int engine_kind)                                                \
  X(graph_destroy, "dnnl_graph_graph_destroy", Graph)                                                                \
  X(graph_add, "dnnl_graph_add_op", Graph, GraphOp)                                                                  \
  X(graph_finalize, "dnnl_graph_graph_finalize", Graph)                                                              \
  X(graph_filter, "dnnl_graph_graph_filter", Graph, int policy)                                                      \
  X(graph_partition_count, "dnnl_graph_graph_get_partition_num", Graph, std::size_t*)                                \
  X(graph_partitions, "dnnl_graph_graph_get_partitions", Graph, std::size_t, Partition*)                             \
  X(graph_op_create, "dnnl_graph_op_create", GraphOp*, std::size_t id, int kind, const char* name)                   \
  X(graph_op_destroy, "dnnl_graph_op_destroy", GraphOp)                                                              \
  X(graph_op_input, "dnnl_graph_op_add_input", GraphOp, const LogicalTensor*)                                        \
  X(graph_op_output, "dnnl_graph_op_add_output", GraphOp, const LogicalTensor*)                                      \
  X(graph_op_bool, "dnnl_graph_op_set_attr_bool", GraphOp, int name, const uint8_t*, std::size_t)                    \
  X(graph_op_int, "dnnl_graph_op_set_attr_s64", GraphOp, int name, const int64_t*, std::size_t)                      \
  X(graph_op_text, "dnnl_graph_op_set_attr_str", GraphOp, int name, const char*, std::size_t)                        \
  X(partition_destroy, "dnnl_graph_partition_destroy", Partition)                                                    \
  X(partition_is_supported, "dnnl_graph_partition_is_supported", Partition, uint8_t*)                                \
  X(partition_compile, "dnnl_graph_partition_compile", Partition, CompiledPartition, std::size_t,                    \
    const LogicalTensor**, std::size_t, const LogicalTensor**, Engine)                                               \
  X(compiled_create, "dnnl_graph_compiled_partition_create", CompiledPartition*, Partition)                          \
  X(compiled_destroy, "dnnl_graph_compiled_partition_destroy", CompiledPartition)                                    \
  X(compiled_execute, "dnnl_graph_compiled_partition_execute", CompiledPartition, Stream, std::size_t,               \
    const GraphTensor*, std::size_t, const GraphTensor*)                                                             \
  X(graph_tensor_create, "dnnl_graph_tensor_create", GraphTensor*, const LogicalTensor*, Engine, void*)              \
  X(graph_tensor_destroy, "dnnl_graph_tensor_destroy", GraphTensor)

}  // namespace lowbit::onednn
