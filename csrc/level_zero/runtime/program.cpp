// SPDX-License-Identifier: Apache-2.0
#include "level_zero/runtime/program.hpp"

#include <cstring>

#include "core/disk_cache.hpp"
#include "core/once.hpp"
#include "level_zero/runtime/modules.hpp"
#include "level_zero/runtime/specialise.hpp"

namespace lowbit::level_zero {
namespace {

// By default, division and square root have 2.5 and 3 ulp: not the bits of the CPU.
#define LOWBIT_FLAGS "-cl-fp32-correctly-rounded-divide-sqrt"
constexpr const char* kFlags[] = {LOWBIT_FLAGS, LOWBIT_FLAGS " -ze-opt-large-register-file"};
#undef LOWBIT_FLAGS

std::string_view bytes_of(std::span<const uint32_t> words) {
  return {reinterpret_cast<const char*>(words.data()), words.size_bytes()};
}

// The driver's log of a build, without its last line feed and zero.
std::string log_text(BuildLog log) {
  std::size_t bytes = 0;
  if (!log || api().read_log(log, &bytes, nullptr) != 0) return "";
  std::string text(bytes, '\0');
  if (bytes && api().read_log(log, &bytes, text.data()) != 0) text.clear();
  while (!text.empty() && (text.back() == '\0' || text.back() == '\n')) text.pop_back();
  return text;
}

Module create(const Gpu& on, const ModuleDescription& description, std::string_view name) {
  Module module = nullptr;
  BuildLog log = nullptr;
  const Result failed = api().create_module(on.context, on.handle, &description, &module, &log);
  const std::string text = log_text(log);
  if (log) api().destroy_log(log);
  const std::string said = text.empty() ? "" : concat(" (the driver: ", text, ")");
  if (failed) ensure(failed, concat(on.name, ": building ", name, said));
  return module;
}

Module build(const Gpu& on, const Image& image, const char* flags) {
  std::vector<std::size_t> bytes;
  std::vector<const uint8_t*> images;
  for (const auto& words : image.modules)
    bytes.push_back(words.size() * 4), images.push_back(reinterpret_cast<const uint8_t*>(words.data()));
  ModuleDescription description{.bytes = bytes[0], .image = images[0], .flags = flags};
  std::vector<const char*> of_each(images.size(), flags);
  std::vector<const void*> constants(images.size());
  const LinkedModules all{.count = static_cast<uint32_t>(images.size()), .bytes = bytes.data(), .images = images.data(),
                          .flags = of_each.data(), .constants = constants.data()};
  // The first image stays in the description, where drivers ignore it: the loader's validation refuses one without.
  if (images.size() > 1) description.header = {Kind::module, &all};
  return create(on, description, image.name);
}

std::string native_image(Module module) {
  std::size_t bytes = 0;
  if (api().native_binary(module, &bytes, nullptr) != 0) return "";
  std::string image(bytes, '\0');
  return api().native_binary(module, &bytes, reinterpret_cast<uint8_t*>(image.data())) == 0 ? image : "";
}

// Loads from the cache, which returns only whole files: a driver may crash on a truncated module.
Module load(const Gpu& on, const Image& image, const char* flags) {
  Hash hash;
  for (const auto& words : image.modules) hash.add(bytes_of(words));
  hash.add(on.driver).add(on.name).add(flags);
  const std::string path = (cache_folder("level_zero") / concat(image.name, "-", hash.text(), ".native")).string();
  if (const auto kept = read_cached(path)) {
    const ModuleDescription native{.format = ModuleFormat::native, .bytes = kept->size(),
                                   .image = reinterpret_cast<const uint8_t*>(kept->data())};
    Module module = nullptr;
    if (api().create_module(on.context, on.handle, &native, &module, nullptr) == 0) return module;
  }
  const Module made = build(on, image, flags);
  if (const std::string native = native_image(made); !native.empty()) write_cached(path, native);
  return made;
}

uint32_t spilled_bytes(KernelHandle kernel) {
  KernelProperties properties;
  ensure(api().kernel_properties(kernel, &properties), "zeKernelGetProperties");
  return properties.spill_bytes;
}

struct Programs {
  using Key = std::pair<const Gpu*, std::string>;
  mutable std::mutex mutex;
  mutable std::map<Key, Program> loaded;  // nodes never move
};

}  // namespace

const Program& program(const Place& place, std::string_view module, const Build& build) {
  static std::atomic<const Programs*> kept{nullptr};
  const Programs& programs = made_once(kept, [] { return Programs(); });
  const Gpu& on = gpu(place.device);
  std::string key(module);
  const std::span<const int32_t> constants = build.constants;
  key.append(1, '\0').append(reinterpret_cast<const char*>(constants.data()), constants.size_bytes());
  key.append(1, '\0').append(bytes_of(build.mods));
  const std::lock_guard lock(programs.mutex);
  Programs::Key wanted(&on, std::move(key));
  if (const auto found = programs.loaded.find(wanted); found != programs.loaded.end()) return found->second;
  std::vector<uint32_t> words = module_words(module);
  check(!words.empty(), ErrorKind::runtime, name_of(place.device), ": this build has no module ", module);
  Image image{std::string(module), {specialised(std::move(words), constants)}};
  if (!build.mods.empty()) {
    image.modules.emplace_back(build.mods.begin(), build.mods.end());
    image.modules.push_back(module_words("score_ops"));
  }
  return programs.loaded.try_emplace(std::move(wanted), on, std::move(image)).first->second;
}

Program::Program(const Gpu& on, Image image)
    : on_(on), image_(std::move(image)), modules_{load(on, image_, kFlags[0]), nullptr} {}

// If registers do not suffice, the kernel gets twice as many, with half as many threads at once, if that helps.
KernelHandle Program::make(const char* kernel) const {
  const auto from = [&](Module module) {
    const KernelDescription description{.name = kernel};
    KernelHandle made = nullptr;
    ensure(api().create_kernel(module, &description, &made), concat(on_.name, ": ", kernel, " of ", image_.name));
    return made;
  };
  KernelHandle made = from(modules_[0]);
  if (const uint32_t spilled = spilled_bytes(made)) {
    if (!modules_[1]) modules_[1] = load(on_, image_, kFlags[1]);
    KernelHandle other = from(modules_[1]);
    if (spilled_bytes(other) < spilled) std::swap(made, other);
    api().destroy_kernel(other);
  }
  ensure(api().set_indirect_access(made, kIndirectAccess), "zeKernelSetIndirectAccess");
  return made;
}

void Program::launch(const Place& place, const char* kernel, int64_t groups, int threads, const void* args,
                     std::size_t bytes) const {
  const Gpu& on = gpu(place.device);
  const auto what = [&] {
    return concat(name_of(place.device), ": ", kernel, " of ", image_.name, ", ", groups, " groups of ", threads,
                  " threads");
  };
  const std::lock_guard lock(mutex_);  // arguments are stored in the kernel object
  auto found = kernels_.find(kernel);
  if (found == kernels_.end()) found = kernels_.emplace(kernel, make(kernel)).first;
  const GroupCount count{static_cast<uint32_t>(groups)};
  const std::lock_guard list_lock(*on.mutex);
  Result failed = api().set_group_size(found->second, static_cast<uint32_t>(threads), 1, 1);
  if (!failed) failed = api().set_argument(found->second, 0, bytes, args);
  if (!failed) failed = api().append_launch(on.list, found->second, &count, nullptr, 0, nullptr);
  if (!failed) failed = api().append_barrier(on.list, nullptr, 0, nullptr);
  if (failed) ensure(failed, what());
}

}  // namespace lowbit::level_zero
