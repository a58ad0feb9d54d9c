// SPDX-License-Identifier: Apache-2.0
#include "level_zero/onednn/product.hpp"

#include <array>
#include <map>
#include <mutex>

#include "core/once.hpp"
#include "level_zero/runtime/driver.hpp"
#include "onednn/kept.hpp"

namespace lowbit::level_zero {
namespace {

using namespace onednn;  // its handles; `api` and `ensure` are said with their room

const onednn::Api& library() {
  const onednn::Api& found = onednn::api();
  check(found.gpu_engine && found.gpu_memory, ErrorKind::runtime, onednn::facts().path,
        " has no engine for Level Zero: wanted a build with ONEDNN_GPU_RUNTIME=ZE");
  return found;
}

// A GPU as oneDNN knows it. The stream is its own: it wants a list that runs in order by itself.
struct GpuEngine {
  Engine engine = nullptr;
  onednn::Stream stream = nullptr;
  std::mutex* mutex = nullptr;  // of the stream
};

GpuEngine make_engine(int16_t index) {
  const Gpu& on = gpu({DeviceType::level_zero, index});
  GpuEngine made{.mutex = new std::mutex};
  onednn::ensure(library().gpu_engine(&made.engine, on.driver_handle, on.handle, on.context),
                 "dnnl_ze_interop_engine_create");
  onednn::ensure(library().stream_create(&made.stream, made.engine, kInOrder), "dnnl_stream_create");
  return made;
}

// They stay for as long as the process lives, as our own lists do.
const GpuEngine& engine_of(int16_t index) {
  struct Engines {
    std::mutex mutex;
    std::map<int16_t, GpuEngine> made;
  };
  static std::atomic<Engines* const*> kept{nullptr};
  Engines& all = *made_once(kept, [] { return new Engines; });
  const std::lock_guard lock(all.mutex);
  const auto found = all.made.find(index);
  return found != all.made.end() ? found->second : all.made.emplace(index, make_engine(index)).first->second;
}

Owned<MemoryDesc> matrix(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride, int type) {
  const int64_t shape[] = {rows, columns}, strides[] = {row_stride, column_stride};
  MemoryDesc desc;
  onednn::ensure(library().strided_desc(&desc, 2, shape, type, strides), "dnnl_memory_desc_create_with_strides");
  return Owned<MemoryDesc>(desc);
}

Owned<Attributes> attributes() {
  Attributes made;
  onednn::ensure(library().attr_create(&made), "dnnl_primitive_attr_create");
  Owned<Attributes> owned(made);
  onednn::ensure(library().set_scratchpad(made, kUserScratchpad), "dnnl_primitive_attr_set_scratchpad_mode");
  onednn::ensure(library().set_math(made, kStrictMath), "dnnl_primitive_attr_set_fpmath_mode");
  return owned;
}

Owned<Memory> memory(const Owned<MemoryDesc>& desc, Engine engine, const void* data) {
  void* handle = const_cast<void*>(data);
  Memory made;
  onednn::ensure(library().gpu_memory(&made, desc.get(), engine, 1, &handle), "dnnl_ze_interop_memory_create");
  return Owned<Memory>(made);
}

bool is_reference(std::string_view implementation) {  // "ocl:ref:any"
  return implementation.starts_with("ref") || implementation.find(":ref") != std::string_view::npos;
}

thread_local Kept<Product::Key, Product> kept_products;

}  // namespace

Product::Product(const Key& key)
    : key_(key),
      x_(matrix(key.m, key.k, key.k, 1, type_of(key.dtype))),
      w_(matrix(key.k, key.n, 1, key.k, type_of(key.dtype))),
      y_(matrix(key.m, key.n, key.n, 1, key.dtype == DType::int8 ? kInt32 : kFloat32)) {
  PrimitiveDesc made;
  const int status = library().matmul(&made, engine_of(key.gpu).engine, x_.get(), w_.get(), nullptr, y_.get(),
                                      attributes().get());
  if (status == kUnimplemented) {
    reason_ = "oneDNN has no implementation of this product for this GPU";
    return;
  }
  onednn::ensure(status, "dnnl_matmul_primitive_desc_create");
  const Owned<PrimitiveDesc> desc(made);
  const char* implementation = "";
  onednn::ensure(library().query(desc.get(), kQueryImplementation, 0, &implementation), "dnnl_primitive_desc_query");
  if (is_reference(implementation)) {
    reason_ = concat("oneDNN has only its reference implementation of this product for this GPU, ", implementation);
    return;
  }
  room_ = copy_of(desc.get(), kQueryScratchpad);
  room_bytes_ = static_cast<int64_t>(library().desc_bytes(room_.get()));
  matmul_ = primitive(desc.get());
}

void Product::run(const DenseProduct& product, void* room) const {
  const GpuEngine& on = engine_of(key_.gpu);
  const Owned<Memory> x = memory(x_, on.engine, product.x), w = memory(w_, on.engine, product.w),
                      y = memory(y_, on.engine, product.y),
                      scratchpad = room_bytes_ ? memory(room_, on.engine, room) : nullptr;
  const std::array<Argument, 4> arguments{
      {{kSource, x.get()}, {kWeights, w.get()}, {kDestination, y.get()}, {kScratchpad, scratchpad.get()}}};
  const std::lock_guard lock(*on.mutex);
  onednn::ensure(library().execute(matmul_.get(), on.stream, room_bytes_ ? 4 : 3, arguments.data()),
                 "dnnl_primitive_execute");
  onednn::ensure(library().stream_wait(on.stream), "dnnl_stream_wait");
}

std::shared_ptr<const Product> product_for(Device device, const DenseProduct& of) {
  library();
  return kept_products.find({device.index, of.m, of.n, of.k, of.dtype});
}

}  // namespace lowbit::level_zero
