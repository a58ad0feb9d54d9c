// SPDX-License-Identifier: Apache-2.0
// The handles of zsim. Commands of a list run when they are waited for, no sooner, and between two
// barriers in the reverse of the order in which they came: commands that a client does not wait for or order go wrong.
#pragma once

#include <level_zero/ze_api.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "opencl.hpp"

namespace zsim {

// One lock for all: this is a test.
inline std::recursive_mutex everything;

// The fault that is due: "memory", "lost", "build", and after how many calls that could have it.
struct Fault {
  std::string kind;
  int after = 0;
};
inline Fault fault;
inline bool is_lost = false;

inline bool fails(const char* kind) { return fault.kind == kind && fault.after-- <= 0; }

using Memory = std::map<const char*, std::size_t>;
inline Memory memory;  // live allocations

inline bool is_live(const void* p, std::size_t bytes) {
  auto after = memory.upper_bound(static_cast<const char*>(p));
  if (after == memory.begin()) return false;
  const auto& [begin, size] = *--after;
  return static_cast<const char*>(p) + bytes <= begin + size;
}

}  // namespace zsim

struct _ze_driver_handle_t {};
struct _ze_device_handle_t {};
struct _ze_context_handle_t {};
struct _ze_event_pool_handle_t {
  uint32_t count;
};
struct _ze_module_build_log_handle_t {
  std::string text;
};
struct _ze_module_handle_t {
  cl_program program;
  std::vector<std::string> spirv;  // of each module that was linked
  bool has_large_registers;
  ~_ze_module_handle_t() { zsim::opencl()->clReleaseProgram(program); }
};
struct _ze_kernel_handle_t {
  cl_kernel kernel;
  std::string name;
  bool has_large_registers;
  std::size_t group[3] = {1, 1, 1};
  bool is_indirect = false;
  ~_ze_kernel_handle_t() { zsim::opencl()->clReleaseKernel(kernel); }
};

struct _ze_command_list_handle_t;
struct _ze_event_handle_t {
  bool is_signalled = false;
  _ze_command_list_handle_t* list = nullptr;  // which will signal it
  uint64_t start = 0, end = 0;
};

struct _ze_command_list_handle_t {
  bool is_immediate, is_synchronous;
  std::vector<std::vector<std::function<ze_result_t()>>> waiting{1};  // between barriers
  ze_result_t failed = ZE_RESULT_SUCCESS;

  void add(std::function<ze_result_t()> command) {
    waiting.back().push_back(std::move(command));
    if (is_immediate && is_synchronous) run();
  }
  void add_barrier() { waiting.emplace_back(); }
  ze_result_t run() {
    auto stages = std::move(waiting);
    waiting.assign(1, {});
    for (auto& stage : stages)
      for (auto command = stage.rbegin(); command != stage.rend(); ++command)
        if (const ze_result_t result = (*command)()) failed = result;
    return failed;
  }
};
struct _ze_command_queue_handle_t {
  bool is_synchronous;
  std::vector<_ze_command_list_handle_t*> given;
};
struct _ze_fence_handle_t {
  _ze_command_queue_handle_t* queue;
  bool is_signalled = false;
};
