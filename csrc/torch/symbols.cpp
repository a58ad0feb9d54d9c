// SPDX-License-Identifier: Apache-2.0
#include "torch/symbols.hpp"

#include <atomic>
#include <mutex>

#include "core/os.hpp"

namespace lowbit::torch {
namespace {

Symbols table;
std::atomic<bool> found{false};

struct Loader {
  void* library;  // null in a C++ program that links to torch: the names that all libraries see
  std::string missing;

  template <class Function>
  void optional(Function& function, const char* name) {
    function = reinterpret_cast<Function>(os::find_symbol(library, name));
  }
  template <class Function>
  void required(Function& function, const char* name) {
    optional(function, name);
    if (!function && missing.empty()) missing = name;
  }
  int32_t constant(const char* name) {
    int32_t (*function)() = nullptr;
    required(function, name);
    return function ? function() : -1;
  }
};

bool load(Symbols& s, std::string* reason) {
  Loader loader{os::loaded_library(os::name_of_library("torch_cpu").c_str()), ""};
  if (!os::find_symbol(loader.library, "aoti_torch_delete_tensor_object")) {
    *reason = "torch is not loaded (no libtorch_cpu in this process)";
    return false;
  }
  loader.required(s.library_init_fragment, "aoti_torch_library_init_fragment");
  loader.required(s.library_init_impl, "aoti_torch_library_init_impl");
  loader.required(s.library_def, "aoti_torch_library_def");
  loader.required(s.library_impl, "torch_library_impl");
  loader.required(s.get_dim, "aoti_torch_get_dim");
  loader.required(s.get_sizes, "aoti_torch_get_sizes");
  loader.required(s.get_strides, "aoti_torch_get_strides");
  loader.required(s.get_dtype, "aoti_torch_get_dtype");
  loader.required(s.get_data_ptr, "aoti_torch_get_data_ptr");
  loader.required(s.get_device_type, "aoti_torch_get_device_type");
  loader.required(s.get_device_index, "aoti_torch_get_device_index");
  loader.required(s.get_const_data_ptr, "torch_get_const_data_ptr");
  loader.required(s.empty_strided, "aoti_torch_empty_strided");
  loader.required(s.new_tensor_handle, "aoti_torch_new_tensor_handle");
  loader.required(s.delete_tensor, "aoti_torch_delete_tensor_object");
  loader.required(s.grad_mode_is_enabled, "aoti_torch_grad_mode_is_enabled");
  // c10::TensorImpl::requires_grad of libc10, which is searched too.
  loader.optional(s.requires_grad, "_ZNK3c1010TensorImpl13requires_gradEv");
  loader.required(s.copy, "aoti_torch_copy_");
  loader.optional(s.new_stable_ivalue, "torch_new_stable_ivalue");
  loader.optional(s.delete_stable_ivalue, "torch_delete_stable_ivalue");
  loader.optional(s.exception_text, "torch_exception_get_what_without_backtrace");
  loader.required(s.new_list, "torch_new_list_reserve_size");
  loader.required(s.delete_list, "torch_delete_list");
  loader.required(s.list_size, "torch_list_size");
  loader.required(s.list_item, "torch_list_get_item");
  loader.required(s.list_push, "torch_list_push_back");
  loader.required(s.get_current_stream, "aoti_torch_get_current_stream");
  loader.required(s.delete_stream, "aoti_torch_delete_stream");
  loader.required(s.stream_id, "aoti_torch_stream_id");
  for (int i = 0; i < kDeviceTypeCount; i++)
    s.device_types[i] = loader.constant(concat("aoti_torch_device_type_", kDeviceTypes[i].torch_name).c_str());
  constexpr const char* kDTypes[] = {
      "aoti_torch_dtype_float32", "aoti_torch_dtype_bfloat16", "aoti_torch_dtype_float16",
      "aoti_torch_dtype_float64", "aoti_torch_dtype_uint8",    "aoti_torch_dtype_int8",
      "aoti_torch_dtype_int32",   "aoti_torch_dtype_int64",    "aoti_torch_dtype_bool"};
  for (int i = 0; i < static_cast<int>(DType::other); i++) s.dtypes[i] = loader.constant(kDTypes[i]);
  if (!loader.missing.empty()) *reason = "this torch has no " + loader.missing;
  return loader.missing.empty();
}

}  // namespace

const Symbols* symbols(std::string* reason) {
  static std::mutex mutex;
  if (found.load(std::memory_order_acquire)) return &table;
  const std::lock_guard lock(mutex);
  if (!found.load(std::memory_order_relaxed)) {
    if (!load(table, reason)) return nullptr;
    found.store(true, std::memory_order_release);
  }
  return &table;
}

const Symbols& loaded_symbols() { return table; }

}  // namespace lowbit::torch
