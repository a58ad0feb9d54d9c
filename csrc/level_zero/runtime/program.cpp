// SPDX-License-Identifier: Apache-2.0
#include "level_zero/runtime/program.hpp"

#include <vector>

#include "core/once.hpp"
#include "level_zero/runtime/modules.hpp"
#include "level_zero/runtime/specialise.hpp"

namespace lowbit::level_zero {
namespace {

// Division and roots are rounded to nearest, as on all other devices.
constexpr const char* kBuildFlags = "-cl-fp32-correctly-rounded-divide-sqrt";

std::string text_of(ze::BuildLog log) {
  std::size_t bytes = 0;
  if (!log || api().log_text(log, &bytes, nullptr) || bytes == 0) return "";
  std::string text(bytes, '\0');
  api().log_text(log, &bytes, text.data());
  api().destroy_log(log);
  return concat("\n", text.c_str());
}

ze::Module build(const Gpu& gpu, std::string_view name, std::span<const uint32_t> words,
                 std::span<const uint32_t> functions) {
  const uint8_t* modules[] = {reinterpret_cast<const uint8_t*>(words.data()),
                              reinterpret_cast<const uint8_t*>(functions.data())};
  const std::size_t bytes[] = {words.size_bytes(), functions.size_bytes()};
  const char* flags[] = {kBuildFlags, kBuildFlags};
  const ze::ModuleProgramDesc both{.count = 2, .bytes = bytes, .modules = modules, .build_flags = flags};
  const ze::ModuleDesc desc{.next = functions.empty() ? nullptr : &both, .bytes = bytes[0], .module = modules[0],
                            .build_flags = kBuildFlags};
  ze::Module module = nullptr;
  ze::BuildLog log = nullptr;
  const int result = api().make_module(gpu.context, gpu.device, &desc, &module, &log);
  const std::string said = text_of(log);
  ensure(result, concat("level_zero: building ", name, " for ", gpu.name, said));
  return module;
}

// Of this process, by what they are made of.
struct Programs {
  mutable std::mutex mutex;
  mutable std::map<std::string, Program, std::less<>> built;  // whose nodes never move
};

const Program& find(const Place& place, std::string_view name, std::span<const int32_t> constants,
                    std::span<const uint32_t> functions) {
  static std::atomic<const Programs*> kept{nullptr};
  const Programs& programs = made_once(kept, [] { return Programs(); });
  std::string key = concat(place.device.index, " ", name, " ", constants.size(), " ");
  key.append(reinterpret_cast<const char*>(constants.data()), constants.size_bytes());
  key.append(reinterpret_cast<const char*>(functions.data()), functions.size_bytes());
  const std::lock_guard lock(programs.mutex);
  if (const auto found = programs.built.find(key); found != programs.built.end()) return found->second;
  const std::vector<uint32_t> words = specialised(module_words(name), constants);
  const ze::Module module = build(gpu(place.device), name, words, functions);
  return programs.built.try_emplace(key, std::string(name), module).first->second;
}

}  // namespace

ze::Kernel Program::kernel(const char* name) const {
  if (const auto found = kernels_.find(name); found != kernels_.end()) return found->second;
  const ze::KernelDesc desc{.name = name};
  ze::Kernel made = nullptr;
  ensure(api().make_kernel(module_, &desc, &made), concat("level_zero: finding ", name, " of ", name_));
  ensure(api().set_indirect_access(made, ze::kIndirectHost | ze::kIndirectDevice | ze::kIndirectShared),
         "zeKernelSetIndirectAccess");
  return kernels_.emplace(name, made).first->second;
}

void Program::launch(const Place& place, const char* kernel_name, int64_t groups, int threads, const void* args,
                     std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const ze::Kernel wanted = kernel(kernel_name);
  const auto what =
      concat("level_zero: ", kernel_name, " of ", name_, ", ", groups, " groups of ", threads, " threads");
  ensure(api().set_group_size(wanted, static_cast<uint32_t>(threads), 1, 1), what);
  ensure(api().set_argument(wanted, 0, bytes, args), what);
  const ze::GroupCount count{static_cast<uint32_t>(groups), 1, 1};
  const std::lock_guard appending(list_mutex(place.device));
  ensure(api().launch(gpu(place.device).list, wanted, &count, nullptr, 0, nullptr), what);
}

const Program& program(const Place& place, std::string_view module) { return find(place, module, {}, {}); }
const Program& program(const Place& place, std::string_view module, std::span<const int32_t> constants) {
  return find(place, module, constants, {});
}
const Program& program(const Place& place, std::string_view module, std::span<const uint32_t> functions) {
  return find(place, module, {}, functions);
}

}  // namespace lowbit::level_zero
