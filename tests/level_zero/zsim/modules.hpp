// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "objects.hpp"

namespace zsim {

inline constexpr uint32_t kMaxGroup = 1024;  // threads of a work-group

template <class Handle>
ze_result_t destroy(Handle handle) {
  const std::lock_guard lock(everything);
  delete handle;
  return ZE_RESULT_SUCCESS;
}

ze_result_t create_module(ze_context_handle_t, ze_device_handle_t, const ze_module_desc_t*, ze_module_handle_t*,
                          ze_module_build_log_handle_t*);
ze_result_t native_binary(ze_module_handle_t, std::size_t*, uint8_t*);
ze_result_t read_log(ze_module_build_log_handle_t, std::size_t*, char*);
ze_result_t create_kernel(ze_module_handle_t, const ze_kernel_desc_t*, ze_kernel_handle_t*);
ze_result_t kernel_properties(ze_kernel_handle_t, ze_kernel_properties_t*);
ze_result_t set_group_size(ze_kernel_handle_t, uint32_t, uint32_t, uint32_t);
ze_result_t set_argument(ze_kernel_handle_t, uint32_t, std::size_t, const void*);
ze_result_t set_indirect_access(ze_kernel_handle_t, ze_kernel_indirect_access_flags_t);
std::function<ze_result_t()> launch(ze_kernel_handle_t, const ze_group_count_t&);

}  // namespace zsim
