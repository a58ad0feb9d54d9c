// SPDX-License-Identifier: Apache-2.0
// The sources of all kernels: each a few lines that instantiate a template of the .cuh files. <op>/sources.cpp makes
// those of an op.
#pragma once

#include <vector>

#include "cuda/linear/call.hpp"
#include "cuda/runtime/program.hpp"
#include "formats/layout.hpp"
#include "formats/list.hpp"
#include "formats/state_format.hpp"
#include "rules/list.hpp"

namespace lowbit::cuda {

// The kinds of sources: the first number of a SourceKey.
enum class SourceKind : int64_t { step, convert, activations, linear, dequantize, decoded, attention, decode,
                                  kv_convert, code_tiles, splits, pack, all_finite, wgmma,
                                  expert_pairs, experts, expert_ends, hidden_rows };

// A kernel `name` of `threads` threads that calls `body` with its argument, a struct `Args` (both in lowbit::cuda).
std::string kernel_text(std::string_view name, std::string_view threads, std::string_view Args, std::string_view body);
// The same for a kernel that is launched early, and waits before the call.
std::string early_kernel_text(std::string_view name, std::string_view threads, std::string_view Args,
                              std::string_view body);

inline constexpr int kFloatBlock = 256;  // for formats without scales: elements are assigned as in blocks of 256
struct StepKind {
  Rule rule;
  int moments;
  StateFormat format;
  int64_t block_size;
  DType param, grad;
  SourceKey key() const;
};
Source step_source(const StepKind& kind);
Source convert_source(StateFormat format, bool is_signed, int64_t block_size);

// Whether products may read activations as given.
constexpr bool can_be_in_place(Format format) { return significant_bits(format) <= 8 || is_table(format); }

// Specialisation of a linear kernel. x_parts: parts of float activations; 0: codes.
struct LinearKind {
  Format format;
  int x_parts, tile_groups;
  bool asymmetric;
  int rows;  // rows per CTA: 1, if activations are in place, or 8, 16, 32, 64; 128, 256 by warpgroups
  bool in_place = false;  // bfloat16 activations, which the product reads as given
  bool matrices = false;  // activations in the layout of warpgroup products, of `dtype`
  bool coded = false;     // activations are int8 codes in float16
  DType dtype = DType::bfloat16;

  // Max rows per CTA for which accumulators and the parts of both factors fit in 128 registers, and in shared memory.
  int max_rows() const {
    const int parts = shape().parts, products = x_parts * parts;
    int most = products > 3 || (x_parts > 1 && (asymmetric || tile_groups > 2)) ? 16 : 32;
    if (products == 0) most = tile_groups ? 16 : 32;
    if (parts > 1 && tile_groups > 1) most = 8;
    for (ProductShape of = shape();; most /= 2)
      if (of.rows = most; of.bytes() <= kMaxShared) return most;
  }
  // The same with warpgroup products and activations of dtype `of`. Codes for weights without groups are multiplied as
  // they are, others as float16.
  LinearKind by_warpgroups(DType of) const {
    LinearKind kind = *this;
    kind.matrices = true, kind.in_place = false, kind.coded = x_parts == 0 && tile_groups > 0;
    kind.x_parts = x_parts || kind.coded ? 1 : 0;
    kind.dtype = kind.coded || (x_parts && of == DType::float16) ? DType::float16 : DType::bfloat16;
    return kind;
  }
  // A weight is decoded once for all rows of a CTA; codes need no decoding, and more columns share their activations.
  int max_wgmma_rows() const { return x_parts ? 256 : 128; }
  WgmmaShape wgmma_shape() const { return {bits(format), x_parts == 0, tile_groups, asymmetric, rows}; }
  ProductShape shape() const {
    return {bits(format), parts_of_product((significant_bits(format) + 7) / 8, in_place), x_parts, tile_groups,
            asymmetric,   rows, in_place};
  }
};
Source activations_source(const LinearKind& kind);
Source linear_source(const LinearKind& kind);
std::string arguments_of(const LinearKind& kind);  // those of the template of a product of few rows
Source splits_source(const LinearKind& kind);  // independent of groups, rows and parts
Source code_tiles_source(const LinearKind& kind);  // 64 rows
Source wgmma_source(const LinearKind& kind);       // 32, 64, 128 or 256 rows
Source dequantize_source(Format format, Layout layout = kKernelLayout);
Source pack_source(Format format, bool searches);  // one for all integer formats
Source all_finite_source();
Source hidden_rows_source();
Source decoded_source(Format format, bool codes);

void add_once(std::vector<Source>& all, Source source);  // unless one with its name exists
// Without mods, for common head dims.
void add_attention_sources(std::vector<Source>& all, const std::string& architecture);
void add_decode_sources(std::vector<Source>& all);
// Warpgroup products, which only kHopper has, with bfloat16 or int8 activations; from 64 rows on, for levels from 32.
inline constexpr char kHopper[] = "sm_90a";
void add_wgmma_sources(std::vector<Source>& all, const LinearKind& kind);
// The sources of the optimizers' defaults, and of the most common configurations of linear and attention.
LOWBIT_API std::vector<Source> common_sources(const std::string& architecture);
// Every specialisation of linear that a call can request; with warpgroups, for bfloat16.
LOWBIT_API std::vector<Source> linear_sources(const std::string& architecture);

}  // namespace lowbit::cuda
