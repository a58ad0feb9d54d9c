// SPDX-License-Identifier: Apache-2.0
// The part of oneDNN's C API that is called, declared here so that the build needs no oneDNN header. Names and numbers
// are those of oneapi/dnnl/dnnl_types.h of version 3, whose ABI is stable for all of 3.x.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lowbit::onednn {

// Handles are opaque; each has its own type here, so that they cannot be confused.
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
constexpr int kStrictMath = 0;                                                  // dnnl_fpmath_mode_t
constexpr int kOutOfMemory = 1, kUnimplemented = 3;                             // dnnl_status_t
constexpr int kFloat32 = 3;                                                     // dnnl_data_type_t
constexpr int kPanels16a16b = 503;                                              // dnnl_format_tag_t
constexpr int kGeluTanh = 43, kSwish = 44;                                      // dnnl_alg_kind_t
constexpr int kBinaryAdd = 131056, kBinaryMul = 131057;
constexpr int kQueryImplementation = 8, kQueryInnerCount = 263, kQueryInnerBlocks = 264, kQueryInnerDims = 265;
constexpr int kQueryScratchpad = 136;                                           // dnnl_query_t
constexpr int kSource = 1, kDestination = 17, kWeights = 33, kScratchpad = 80;  // DNNL_ARG_*
constexpr int argument_of_post_op(int i) { return 32768 * (i + 1) | 2; }        // second operand of post-op i

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
  X(query, "dnnl_primitive_desc_query", const PrimitiveDescHandle*, int what, int index, void*)                       \
  X(primitive_desc_destroy, "dnnl_primitive_desc_destroy", PrimitiveDesc)                                             \
  X(primitive_create, "dnnl_primitive_create", Primitive*, const PrimitiveDescHandle*)                                \
  X(primitive_destroy, "dnnl_primitive_destroy", Primitive)                                                           \
  X(execute, "dnnl_primitive_execute", const PrimitiveHandle*, Stream, int count, const Argument*)

}  // namespace lowbit::onednn
