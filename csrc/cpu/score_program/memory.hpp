// SPDX-License-Identifier: Apache-2.0
// Instructions of a score program that access captured tensors or sum over a tile: gather, scatter_add, sum.
#pragma once

#include <cstring>

#include "cpu/score_program/strip.hpp"
#include "cpu/score_program/vm.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// The elements an instruction processes: rows x count, in vectors of `width` >= count.
struct Extent {
  int rows, count, width;
};

LOWBIT_INLINE void note_fault(const ScoreCall& call, int64_t tensor, int dim, int64_t index) {
  ScoreFault& fault = call.fault();
  if (fault.seen.exchange(true)) return;
  fault.tensor = static_cast<int>(tensor), fault.dim = dim, fault.index = index;
}

// The positions of the elements of one row in a tensor: start + c * step (+ offsets[c]).
template <class Offset>
struct Addresses {
  bool valid = true;
  int64_t start = 0, step = 0;
  const Offset* offsets = nullptr;
};
constexpr int kOffsets = 256;  // elements per look-up

// Whether all offsets of a tensor fit into 32 bits: a vector holds twice as many, and AVX2 can multiply them: 3 instead
// of 8 ns per 16 elements (Zen 5).
LOWBIT_INLINE bool has_narrow_offsets(const TensorView& tensor, const int64_t* stride) {
  int64_t extent = 0;
  for (int d = 0; d < tensor.rank; d++) {
    if (tensor.shape[d] >= INT32_MAX / 2) return false;
    extent += tensor.shape[d] * (stride[d] < 0 ? -stride[d] : stride[d]);
  }
  return extent < INT32_MAX;
}

// A negative index counts from the end, as in torch.
LOWBIT_INLINE int64_t from_start(int64_t i, int64_t size) { return i < 0 ? i + size : i; }

// offsets = (kAdd: +=) index * stride. True if an index is out of range.
template <bool kAdd, class Int, class Offset>
bool set_offsets(const Int* index, int count, Offset size, Offset stride, Offset* offsets) {
  Offset outside = 0;
  for (int c = 0; c < count; c++) {
    const Offset i = static_cast<Offset>(index[c]), wrapped = i < 0 ? i + size : i;
    outside |= static_cast<Offset>(wrapped < 0) | static_cast<Offset>(wrapped >= size);
    const Offset product = static_cast<Offset>(static_cast<std::make_unsigned_t<Offset>>(wrapped) *
                                               static_cast<std::make_unsigned_t<Offset>>(stride));
    offsets[c] = kAdd ? offsets[c] + product : product;
  }
  return outside != 0;
}

// Addresses of `count` elements of row r, from column c on, by `indices` into a tensor of this shape and these strides;
// `along` as in ScoreStep, `offsets`: scratch of kOffsets. A fault makes them invalid.
template <class T, class Offset>
Addresses<Offset> find_addresses(const ScoreCall& call, int64_t number, const Source<T>* indices, const int32_t* along,
                                 int dims, int64_t r, int c, int count, const int64_t* stride, Offset* offsets) {
  using Int = IntBeside<T>;
  const TensorView& tensor = call.captured()[number];
  Addresses<Offset> to;
  const auto fault = [&](int dim, int64_t index) {
    note_fault(call, number, dim, index);
    return Addresses<Offset>{.valid = false};
  };
  for (int d = 0; d < dims; d++) {
    const Int* index = indices[d].template row<Int>(r) + (indices[d].vector ? c : 0);
    const int64_t size = tensor.shape[d], growth = indices[d].vector ? along[d] : 0;
    const int64_t first = index[0], last = first + growth * (count - 1);
    const bool linear = !indices[d].vector || (along[d] != ScoreStep::kNotLinear && (first < 0) == (last < 0));
    if (linear) {
      for (int64_t end : {first, last})
        if (static_cast<uint64_t>(from_start(end, size)) >= static_cast<uint64_t>(size)) return fault(d, end);
      to.start += from_start(first, size) * stride[d], to.step += growth * stride[d];
      continue;
    }
    const Offset narrow_size = static_cast<Offset>(size), narrow_stride = static_cast<Offset>(stride[d]);
    const bool outside = to.offsets ? set_offsets<true>(index, count, narrow_size, narrow_stride, offsets)
                                    : set_offsets<false>(index, count, narrow_size, narrow_stride, offsets);
    to.offsets = offsets;
    for (int i = 0; outside && i < count; i++)
      if (static_cast<uint64_t>(from_start(index[i], size)) >= static_cast<uint64_t>(size)) return fault(d, index[i]);
  }
  return to;
}

// Addresses of a whole strip with indices linear in both directions (bias[b, h, q, k]): start + r * down + c * along.
struct Plane {
  bool valid = true;
  int64_t start = 0, down = 0, along = 0;

  template <class Offset>
  LOWBIT_INLINE Addresses<Offset> row(int64_t r) const { return {.start = start + r * down, .step = along}; }
};

// Invalid if an index is not linear, changes its sign or is out of range: then find_addresses handles it.
template <class T>
Plane find_plane(const TensorView& tensor, const Source<T>* indices, const int32_t* along, const int32_t* down,
                 int dims, Extent extent, const int64_t* stride) {
  Plane plane;
  for (int d = 0; d < dims && plane.valid; d++) {
    const int64_t first = *indices[d].template row<IntBeside<T>>(0), size = tensor.shape[d];
    plane.valid = along[d] != ScoreStep::kNotLinear && down[d] != ScoreStep::kNotLinear;
    const int64_t right = int64_t{along[d]} * (extent.count - 1), below = int64_t{down[d]} * (extent.rows - 1);
    for (int64_t corner : {first, first + right, first + below, first + right + below})
      plane.valid &=
          (corner < 0) == (first < 0) && static_cast<uint64_t>(from_start(corner, size)) < static_cast<uint64_t>(size);
    plane.start += from_start(first, size) * stride[d], plane.down += down[d] * stride[d],
        plane.along += along[d] * stride[d];
  }
  return plane;
}

// Conversion of captured elements to register types.
template <class Element> LOWBIT_INLINE Element decoded(Element a) { return a; }
struct Bfloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };
LOWBIT_INLINE float decoded(Bfloat16 a) { return float_from_bfloat16(a.bits); }
LOWBIT_INLINE float decoded(Float16 a) { return float_from_float16(a.bits); }
struct Boolean { uint8_t byte; };
LOWBIT_INLINE int decoded(Boolean a) { return a.byte != 0; }

template <class Element, class Offset, class Out>
void load_elements(const void* data, const Addresses<Offset>& at, int from, int count, Out* out) {
  const Element* base = static_cast<const Element*>(data) + at.start;
  if (at.offsets && at.step == 0)
    for (int c = from; c < count; c++) out[c] = static_cast<Out>(decoded(base[at.offsets[c]]));
  else if (at.offsets)
    for (int c = from; c < count; c++) out[c] = static_cast<Out>(decoded(base[at.offsets[c] + c * at.step]));
  else if (at.step == 1)
    for (int c = from; c < count; c++) out[c] = static_cast<Out>(decoded(base[c]));
  else if (at.step == 0)
    for (int c = from; c < count; c++) out[c] = static_cast<Out>(decoded(*base));
  else
    for (int c = from; c < count; c++) out[c] = static_cast<Out>(decoded(base[c * at.step]));
}

// Whole vectors of float16 by the conversion instruction, which the compiler does not find.
template <class Offset>
LOWBIT_INLINE int load_float16_vectors(const void* data, const Addresses<Offset>& at, int count, float* out) {
  int c = 0;
  if (!at.offsets && at.step == 1)
    for (; c + 16 <= count; c += 16) store(out + c, load_f16(static_cast<const uint16_t*>(data) + at.start + c));
  return c;
}

template <class T, class Offset>
void load_captured(const TensorView& tensor, const Addresses<Offset>& at, int count, T* out) {
  IntBeside<T>* const out_int = reinterpret_cast<IntBeside<T>*>(out);
  switch (tensor.dtype) {
    case DType::float32: return load_elements<float>(tensor.data, at, 0, count, out);
    case DType::bfloat16: return load_elements<Bfloat16>(tensor.data, at, 0, count, out);
    case DType::float16: {
      int done = 0;
      if constexpr (sizeof(T) == 4) done = load_float16_vectors(tensor.data, at, count, out);
      return load_elements<Float16>(tensor.data, at, done, count, out);
    }
    case DType::float64: return load_elements<double>(tensor.data, at, 0, count, out);
    case DType::int32: return load_elements<int32_t>(tensor.data, at, 0, count, out_int);
    case DType::int64: return load_elements<int64_t>(tensor.data, at, 0, count, out_int);
    default: return load_elements<Boolean>(tensor.data, at, 0, count, out_int);
  }
}

template <class Offset, class T>
void gather_rows(const ScoreCall& call, const ScoreStep& step, const Plane& plane, const Source<T>* indices, T* out,
                 int64_t out_stride, Extent extent) {
  const TensorView& tensor = call.captured()[step.immediate];
  for (int64_t r = 0; r < extent.rows; r++) {
    T* const to = out + r * out_stride;
    std::memset(to + extent.count, 0, sizeof(T) * (extent.width - extent.count));
    if (plane.valid) {
      load_captured(tensor, plane.row<Offset>(r), extent.count, to);
      continue;
    }
    Offset offsets[kOffsets];
    for (int c = 0; c < extent.count; c += kOffsets) {
      const int count = extent.count - c < kOffsets ? extent.count - c : kOffsets;
      const auto at = find_addresses(call, step.immediate, indices, step.along.data(), step.operand_count, r, c, count,
                                     tensor.stride.data(), offsets);
      if (at.valid) load_captured(tensor, at, count, to + c);
      else std::memset(to + c, 0, sizeof(T) * count);
    }
  }
}

template <class T>
void gather_step(const ScoreCall& call, const ScoreStep& step, const Plane& plane, const Source<T>* indices, T* out,
                 int64_t out_stride, Extent extent) {
  const TensorView& tensor = call.captured()[step.immediate];
  if (has_narrow_offsets(tensor, tensor.stride.data()))
    gather_rows<int32_t>(call, step, plane, indices, out, out_stride, extent);
  else gather_rows<int64_t>(call, step, plane, indices, out, out_stride, extent);
}

template <class Sum, class Offset, class T>
void add_elements(void* data, const Addresses<Offset>& at, int count, const T* value) {
  Sum* base = static_cast<Sum*>(data) + at.start;
  if (!at.offsets && at.step == 1)
    for (int c = 0; c < count; c++) base[c] += static_cast<Sum>(value[c]);
  else
    for (int c = 0; c < count; c++) base[(at.offsets ? at.offsets[c] : 0) + c * at.step] += static_cast<Sum>(value[c]);
}

// The gradient of a captured tensor is contiguous, whatever the tensor's strides.
template <class T>
void scatter_step(const ScoreCall& call, const ScoreStep& step, const Source<T>& value, const Source<T>* indices,
                  CapturedGradient target, Extent extent) {
  const TensorView& tensor = call.captured()[step.immediate];
  int64_t stride[TensorView::kMaxRank], elements = 1, offsets[kOffsets];
  for (int d = tensor.rank - 1; d >= 0; d--) stride[d] = elements, elements *= tensor.shape[d];
  const int32_t *along = step.along.data() + 1, *down = step.down.data() + 1;
  const int dims = step.operand_count - 1;
  const Plane plane = find_plane(tensor, indices, along, down, dims, extent, stride);
  for (int64_t r = 0; r < extent.rows; r++)
    for (int c = 0; c < extent.count; c += kOffsets) {
      const int count = extent.count - c < kOffsets ? extent.count - c : kOffsets;
      Addresses<int64_t> at = plane.row<int64_t>(r);
      at.start += c * at.step;
      if (!plane.valid) at = find_addresses(call, step.immediate, indices, along, dims, r, c, count, stride, offsets);
      if (!at.valid) continue;
      if (target.wide) add_elements<double>(target.data, at, count, value.template row<T>(r) + c);
      else add_elements<T>(target.data, at, count, value.template row<T>(r) + c);
    }
}

// Sixteen partial sums, then these in order.
template <class T>
LOWBIT_INLINE T sum_of(const T* value, int count) {
  T lanes[16] = {};
  int c = 0;
  for (; c + 16 <= count; c += 16)
    for (int i = 0; i < 16; i++) lanes[i] += value[c + i];
  for (int i = 0; c + i < count; i++) lanes[i] += value[c + i];
  T sum = 0;
  for (T lane : lanes) sum += lane;
  return sum;
}

// Adds rows x count values to `to`, whose rows are `row_step` apart, with one element per column or a single one.
template <class T>
void sum_step(const Source<T>& value, T* to, int64_t row_step, bool per_column, Extent extent) {
  for (int64_t r = 0; r < extent.rows; r++) {
    const T* from = value.template row<T>(r);
    T* at = to + r * row_step;
    if (!per_column) *at += sum_of(from, extent.count);
    else
      for (int c = 0; c < extent.count; c++) at[c] += from[c];
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
