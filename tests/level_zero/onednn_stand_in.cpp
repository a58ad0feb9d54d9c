// SPDX-License-Identifier: Apache-2.0
// A libdnnl.so.3 for tests of csrc/level_zero/onednn: dense products over memory of zsim, computed in double as late
// as oneDNN may, when its stream is waited for. Before that y and the scratchpad hold rubbish. What it is told to
// refuse or to fail at stands in ONEDNN_STAND_IN. No declaration is shared with csrc/onednn/api.hpp.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace {

enum { kSuccess = 0, kOutOfMemory = 1, kInvalidArguments = 2, kUnimplemented = 3 };
enum { kF16 = 1, kBF16 = 2, kF32 = 3, kS32 = 4, kS8 = 5 };
constexpr std::size_t kScratchpadBytes = 1000;

struct Desc { long shape[2], strides[2]; int type; };
struct PrimitiveDesc { Desc x, w, y, scratchpad; };
struct Memory { Desc desc; void* data; };
struct Argument { int which; Memory* memory; };
struct Stream { std::vector<std::pair<PrimitiveDesc, std::vector<Argument>>> given; };

bool told(const char* what) {
  const char* const words = std::getenv("ONEDNN_STAND_IN");
  return words && std::string(words).find(what) != std::string::npos;
}

double value(const Memory& of, long row, long column) {
  const long at = row * of.desc.strides[0] + column * of.desc.strides[1];
  switch (of.desc.type) {
    case kF32: return static_cast<const float*>(of.data)[at];
    case kS8: return static_cast<const int8_t*>(of.data)[at];
    case kF16: return static_cast<double>(static_cast<const _Float16*>(of.data)[at]);
    default: {
      const uint32_t bits = uint32_t{static_cast<const uint16_t*>(of.data)[at]} << 16;
      float f;
      std::memcpy(&f, &bits, 4);
      return f;
    }
  }
}

Memory* find(const std::vector<Argument>& arguments, int which) {
  for (const Argument& argument : arguments)
    if (argument.which == which) return argument.memory;
  return nullptr;
}

void multiply(const PrimitiveDesc& of, const std::vector<Argument>& arguments) {
  const Memory &x = *find(arguments, 1), &w = *find(arguments, 33), &y = *find(arguments, 17);
  for (long m = 0; m < of.y.shape[0]; m++)
    for (long n = 0; n < of.y.shape[1]; n++) {
      double sum = 0;
      for (long k = 0; k < of.x.shape[1]; k++) sum += value(x, m, k) * value(w, k, n);
      const long at = m * of.y.strides[0] + n * of.y.strides[1];
      if (of.y.type == kS32) static_cast<int32_t*>(y.data)[at] = static_cast<int32_t>(sum);
      else static_cast<float*>(y.data)[at] = static_cast<float>(sum);
    }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

struct { int version[3]; const char* hash; unsigned cpu, gpu; } said = {{3, 13, 1}, "stand-in", 0, 1024};
EXPORTED const void* dnnl_version() { return &said; }
EXPORTED int dnnl_ze_interop_engine_create(void** engine, void* driver, void* device, void* context) {
  if (told("engine")) return kInvalidArguments;
  return *engine = driver && device && context ? &said : nullptr, *engine ? kSuccess : kInvalidArguments;
}
EXPORTED int dnnl_stream_create(Stream** stream, void* engine, unsigned flags) {
  return *stream = new Stream, engine == &said && flags == 1 ? kSuccess : kInvalidArguments;
}
EXPORTED int dnnl_memory_desc_create_with_strides(Desc** desc, int rank, const long* shape, int type, const long* by) {
  if (rank != 2) return kInvalidArguments;
  return *desc = new Desc{{shape[0], shape[1]}, {by[0], by[1]}, type}, kSuccess;
}
EXPORTED int dnnl_memory_desc_clone(Desc** desc, const Desc* of) { return *desc = new Desc(*of), kSuccess; }
EXPORTED int dnnl_memory_desc_destroy(Desc* desc) { return delete desc, kSuccess; }
EXPORTED std::size_t dnnl_memory_desc_get_size(const Desc* desc) { return static_cast<std::size_t>(desc->shape[0]); }
EXPORTED int dnnl_primitive_attr_create(void** attributes) { return *attributes = &said, kSuccess; }
EXPORTED int dnnl_matmul_primitive_desc_create(PrimitiveDesc** made, void* engine, const Desc* x, const Desc* w,
                                               const Desc* bias, const Desc* y, const void* attributes) {
  if (told("unimplemented")) return kUnimplemented;
  const bool codes = x->type == kS8;
  const bool fits = engine == &said && attributes == &said && !bias && x->shape[0] == y->shape[0] &&
                    x->shape[1] == w->shape[0] && w->shape[1] == y->shape[1] && x->type == w->type &&
                    y->type == (codes ? kS32 : kF32);
  if (!fits) return kInvalidArguments;
  *made = new PrimitiveDesc{*x, *w, *y, {{kScratchpadBytes, 1}, {1, 1}, kS8}};
  return kSuccess;
}
EXPORTED int dnnl_primitive_desc_query(const PrimitiveDesc* of, int what, int, void* to) {
  if (what == 8) return *static_cast<const char**>(to) = told("reference") ? "ocl:ref:any" : "jit:gemm:any", kSuccess;
  return *static_cast<const Desc**>(to) = &of->scratchpad, what == 136 ? kSuccess : kInvalidArguments;
}
EXPORTED int dnnl_primitive_desc_destroy(PrimitiveDesc* of) { return delete of, kSuccess; }
EXPORTED int dnnl_primitive_create(PrimitiveDesc** made, const PrimitiveDesc* of) {
  return *made = new PrimitiveDesc(*of), kSuccess;
}
EXPORTED int dnnl_primitive_destroy(PrimitiveDesc* of) { return delete of, kSuccess; }
EXPORTED int dnnl_ze_interop_memory_create(Memory** made, const Desc* desc, void* engine, int count, void** handles) {
  if (engine != &said || count != 1 || !handles[0]) return kInvalidArguments;
  return *made = new Memory{*desc, handles[0]}, kSuccess;
}
EXPORTED int dnnl_memory_destroy(Memory* memory) { return memory->data = nullptr, kSuccess; }  // kept: still to be read
EXPORTED int dnnl_primitive_execute(const PrimitiveDesc* of, Stream* stream, int count, const Argument* arguments) {
  if (told("execute")) return kOutOfMemory;
  stream->given.push_back({*of, {arguments, arguments + count}});
  const Memory &y = *find(stream->given.back().second, 17), &room = *find(stream->given.back().second, 80);
  std::memset(y.data, 0xff, static_cast<std::size_t>(of->y.shape[0] * of->y.shape[1]) * 4);
  std::memset(room.data, 0xff, kScratchpadBytes);
  return kSuccess;
}
EXPORTED int dnnl_stream_wait(Stream* stream) {
  for (const auto& [of, arguments] : stream->given) multiply(of, arguments);
  return stream->given.clear(), kSuccess;
}
