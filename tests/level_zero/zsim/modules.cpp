// SPDX-License-Identifier: Apache-2.0
// Modules and kernels of zsim: SPIR-V built, linked and run by OpenCL.
#include "modules.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>

namespace zsim {
namespace {

constexpr char kNative[] = "zsim native\n", kLarge[] = "large register file\n";

std::string log_of(cl_program program) {
  std::size_t bytes = 0;
  const OpenCl& cl = *opencl();
  cl.clGetProgramBuildInfo(program, cl.device, CL_PROGRAM_BUILD_LOG, 0, nullptr, &bytes);
  std::string text(bytes, '\0');
  if (bytes) cl.clGetProgramBuildInfo(program, cl.device, CL_PROGRAM_BUILD_LOG, bytes, text.data(), nullptr);
  return text;
}

std::string native_of(const _ze_module_handle_t& module) {
  std::string image = kNative;
  if (module.has_large_registers) image += kLarge;
  for (const std::string& one : module.spirv) image += std::to_string(one.size()) + "\n" + one;
  return image;
}

// The modules in a native binary; none if it is not one.
std::vector<std::string> modules_in(std::string image) {
  std::vector<std::string> found;
  if (image.rfind(kNative, 0) != 0) return found;
  std::size_t at = sizeof kNative - 1;
  if (image.compare(at, sizeof kLarge - 1, kLarge) == 0) at += sizeof kLarge - 1;
  while (at < image.size()) {
    const std::size_t bytes = std::strtoull(image.c_str() + at, nullptr, 10);
    at = image.find('\n', at) + 1;
    if (at + bytes > image.size()) return {};
    found.push_back(image.substr(at, bytes));
    at += bytes;
  }
  return found;
}

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Functions that the device has and the CPU lacks: a module in the file ZSIM_LINK, linked to every other.
const std::string& emulation() {
  static const std::string found = [] {
    const char* path = std::getenv("ZSIM_LINK");
    return path ? contents(path) : std::string();
  }();
  return found;
}

// For an OpenCL that takes no SPIR-V but LLVM's bitcode, as PoCL 3: ZSIM_TRANSLATOR is the llvm-spirv that makes it.
std::string bitcode_of(const std::string& spirv, const char* translator) {
  const auto folder = std::filesystem::temp_directory_path();
  const std::string from = folder / ("zsim-" + std::to_string(getpid()) + ".spv"), to = from + ".bc";
  std::ofstream(from, std::ios::binary) << spirv;
  const int failed = std::system((std::string(translator) + " -r " + from + " -o " + to).c_str());
  const std::string made = failed ? "" : contents(to);
  std::filesystem::remove(from), std::filesystem::remove(to);
  return made;
}

cl_program program_of(const std::string& spirv, cl_int* failed) {
  const OpenCl& cl = *opencl();
  const char* const translator = std::getenv("ZSIM_TRANSLATOR");
  if (!translator) return cl.clCreateProgramWithIL(cl.context, spirv.data(), spirv.size(), failed);
  const std::string bitcode = bitcode_of(spirv, translator);
  const auto* bytes = reinterpret_cast<const unsigned char*>(bitcode.data());
  const std::size_t count = bitcode.size();
  return cl.clCreateProgramWithBinary(cl.context, 1, &cl.device, &count, &bytes, nullptr, failed);
}

const char* build_flags() {
  const char* given = std::getenv("ZSIM_FLAGS");
  return given ? given : "-cl-std=CL2.0";
}

cl_int set_constants(cl_program program, const ze_module_constants_t* constants) {
  for (uint32_t i = 0; constants && i < constants->numConstants; i++)
    if (const cl_int failed = opencl()->clSetProgramSpecializationConstant(program, constants->pConstantIds[i], 4,
                                                                            constants->pConstantValues[i]))
      return failed;
  return CL_SUCCESS;
}

// OpenCL's code for the same modules, constants and flags from before: a file in the folder ZSIM_KEPT. Building takes
// seconds, reading it back milliseconds.
std::filesystem::path kept_program(const std::vector<std::string>& modules,
                                   const ze_module_constants_t* const* constants, std::size_t with_constants) {
  const char* const folder = std::getenv("ZSIM_KEPT");
  if (!folder) return {};
  std::string all = build_flags();
  for (std::size_t i = 0; i < modules.size(); i++) {
    all += "\nmodule " + modules[i];
    for (uint32_t j = 0; i < with_constants && constants[i] && j < constants[i]->numConstants; j++)
      all += "\nconstant " + std::to_string(constants[i]->pConstantIds[j]) + " " +
             std::to_string(*static_cast<const uint32_t*>(constants[i]->pConstantValues[j]));
  }
  char name[64];
  const std::hash<std::string> hash;
  std::snprintf(name, sizeof name, "%016zx%016zx.program", hash(all), hash(std::to_string(all.size()) + all));
  return std::filesystem::path(folder) / name;
}

cl_program read_program(const std::filesystem::path& path) {
  const OpenCl& cl = *opencl();
  const std::string image = path.empty() ? "" : contents(path);
  if (image.empty()) return nullptr;
  const auto* bytes = reinterpret_cast<const unsigned char*>(image.data());
  const std::size_t count = image.size();
  cl_int failed = CL_SUCCESS;
  cl_program program = cl.clCreateProgramWithBinary(cl.context, 1, &cl.device, &count, &bytes, nullptr, &failed);
  if (failed || cl.clBuildProgram(program, 1, &cl.device, "", nullptr, nullptr)) return nullptr;
  return program;
}

void keep_program(const std::filesystem::path& path, cl_program program) {
  std::size_t bytes = 0;
  const OpenCl& cl = *opencl();
  if (path.empty() || cl.clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof bytes, &bytes, nullptr)) return;
  std::string image(bytes, '\0');
  char* to = image.data();
  if (cl.clGetProgramInfo(program, CL_PROGRAM_BINARIES, sizeof to, &to, nullptr)) return;
  const std::filesystem::path aside = path.string() + "." + std::to_string(getpid());
  std::ofstream(aside, std::ios::binary) << image;
  std::filesystem::rename(aside, path);
}

// ZSIM_SPILLS is a kernel, what it spills and what with large registers: "linear_8 100 0".
uint32_t spilled(const _ze_kernel_handle_t& kernel) {
  const char* const told = std::getenv("ZSIM_SPILLS");
  std::istringstream words(told ? told : "");
  std::string name;
  uint32_t bytes = 0, bytes_large = 0;
  words >> name >> bytes >> bytes_large;
  if (name != kernel.name) return 0;
  return kernel.has_large_registers ? bytes_large : bytes;
}

}  // namespace

ze_result_t create_module(ze_context_handle_t, ze_device_handle_t, const ze_module_desc_t* description,
                          ze_module_handle_t* to, ze_module_build_log_handle_t* log) {
  const std::lock_guard lock(everything);
  if (!description || !to) return ZE_RESULT_ERROR_INVALID_NULL_POINTER;
  if (log) *log = new _ze_module_build_log_handle_t;
  if (is_lost) return ZE_RESULT_ERROR_DEVICE_LOST;
  if (fails("build")) {
    if (log) (*log)->text = "zsim was told to fail";
    return ZE_RESULT_ERROR_MODULE_BUILD_FAILURE;
  }
  std::vector<std::string> spirv;
  bool has_large_registers = description->pBuildFlags && std::strstr(description->pBuildFlags, "-large-register-file");
  const ze_module_constants_t* const* constants = &description->pConstants;
  const auto* linked = static_cast<const ze_module_program_exp_desc_t*>(description->pNext);
  if (linked && linked->stype == ZE_STRUCTURE_TYPE_MODULE_PROGRAM_EXP_DESC) {
    for (uint32_t i = 0; i < linked->count; i++)
      spirv.emplace_back(reinterpret_cast<const char*>(linked->pInputModules[i]), linked->inputSizes[i]);
    constants = linked->pConstants;
  } else {
    spirv.emplace_back(reinterpret_cast<const char*>(description->pInputModule), description->inputSize);
    if (description->format == ZE_MODULE_FORMAT_NATIVE) {
      has_large_registers = spirv[0].rfind(std::string(kNative) + kLarge, 0) == 0;
      spirv = modules_in(spirv[0]);
    }
    if (spirv.empty()) return ZE_RESULT_ERROR_INVALID_NATIVE_BINARY;
  }
  const OpenCl& cl = *opencl();
  std::vector<std::string> all = spirv;
  if (!emulation().empty()) all.push_back(emulation());
  const bool has_constants = description->format != ZE_MODULE_FORMAT_NATIVE && constants;
  const auto kept = kept_program(all, constants, has_constants ? spirv.size() : 0);
  if (cl_program program = read_program(kept)) {
    *to = new _ze_module_handle_t{program, std::move(spirv), has_large_registers};
    return ZE_RESULT_SUCCESS;
  }
  std::vector<cl_program> programs;
  cl_int failed = CL_SUCCESS;
  for (std::size_t i = 0; i < all.size() && !failed; i++) {
    cl_program program = program_of(all[i], &failed);
    if (!failed && has_constants && i < spirv.size())
      failed = set_constants(program, constants[i]);
    if (failed) break;
    if (all.size() == 1) failed = cl.clBuildProgram(program, 1, &cl.device, build_flags(), nullptr, nullptr);
    else failed = cl.clCompileProgram(program, 1, &cl.device, build_flags(), 0, nullptr, nullptr, nullptr, nullptr);
    if (failed && log) (*log)->text = log_of(program);
    programs.push_back(program);
  }
  cl_program program = programs.empty() ? nullptr : programs[0];
  if (!failed && programs.size() > 1) {
    program = cl.clLinkProgram(cl.context, 1, &cl.device, "", static_cast<cl_uint>(programs.size()), programs.data(),
                               nullptr, nullptr, &failed);
    if (failed && log && program) (*log)->text = log_of(program);
  }
  if (failed) return ZE_RESULT_ERROR_MODULE_BUILD_FAILURE;
  keep_program(kept, program);
  *to = new _ze_module_handle_t{program, std::move(spirv), has_large_registers};
  return ZE_RESULT_SUCCESS;
}

// As much of `from` as `to` holds, if it is given; `bytes` is then the size of all.
static ze_result_t give(const char* from, std::size_t size, std::size_t* bytes, void* to) {
  if (to) std::memcpy(to, from, std::min(*bytes, size));
  *bytes = size;
  return ZE_RESULT_SUCCESS;
}

ze_result_t native_binary(ze_module_handle_t module, std::size_t* bytes, uint8_t* to) {
  const std::string image = native_of(*module);
  return give(image.data(), image.size(), bytes, to);
}

ze_result_t read_log(ze_module_build_log_handle_t log, std::size_t* bytes, char* to) {
  return give(log->text.c_str(), log->text.size() + 1, bytes, to);
}

ze_result_t create_kernel(ze_module_handle_t module, const ze_kernel_desc_t* description, ze_kernel_handle_t* to) {
  const std::lock_guard lock(everything);
  cl_int failed = CL_SUCCESS;
  cl_kernel kernel = opencl()->clCreateKernel(module->program, description->pKernelName, &failed);
  if (failed) return ZE_RESULT_ERROR_INVALID_KERNEL_NAME;
  *to = new _ze_kernel_handle_t{kernel, description->pKernelName, module->has_large_registers};
  return ZE_RESULT_SUCCESS;
}

ze_result_t kernel_properties(ze_kernel_handle_t kernel, ze_kernel_properties_t* to) {
  cl_uint arguments = 0;
  opencl()->clGetKernelInfo(kernel->kernel, CL_KERNEL_NUM_ARGS, sizeof arguments, &arguments, nullptr);
  to->numKernelArgs = arguments;
  to->localMemSize = to->privateMemSize = 0;
  to->spillMemSize = spilled(*kernel);
  return ZE_RESULT_SUCCESS;
}

ze_result_t set_group_size(ze_kernel_handle_t kernel, uint32_t x, uint32_t y, uint32_t z) {
  if (!x || !y || !z || uint64_t{x} * y * z > kMaxGroup) return ZE_RESULT_ERROR_INVALID_GROUP_SIZE_DIMENSION;
  kernel->group[0] = x, kernel->group[1] = y, kernel->group[2] = z;
  return ZE_RESULT_SUCCESS;
}

ze_result_t set_argument(ze_kernel_handle_t kernel, uint32_t index, std::size_t bytes, const void* value) {
  const std::lock_guard lock(everything);
  const cl_int failed = opencl()->clSetKernelArg(kernel->kernel, index, bytes, value);
  if (failed == CL_INVALID_ARG_INDEX) return ZE_RESULT_ERROR_INVALID_KERNEL_ARGUMENT_INDEX;
  return failed ? ZE_RESULT_ERROR_INVALID_KERNEL_ARGUMENT_SIZE : ZE_RESULT_SUCCESS;
}

ze_result_t set_indirect_access(ze_kernel_handle_t kernel, ze_kernel_indirect_access_flags_t flags) {
  kernel->is_indirect = flags != 0;
  return ZE_RESULT_SUCCESS;
}

// With the arguments that it has now. Pointers in a struct are followed only where the client has said so.
std::function<ze_result_t()> launch(ze_kernel_handle_t kernel, const ze_group_count_t& groups) {
  cl_int failed = CL_SUCCESS;
  cl_kernel copy = opencl()->clCloneKernel(kernel->kernel, &failed);
  std::size_t local[3], global[3];
  const uint32_t counts[] = {groups.groupCountX, groups.groupCountY, groups.groupCountZ};
  for (int i = 0; i < 3; i++) local[i] = kernel->group[i], global[i] = counts[i] * local[i];
  const bool is_indirect = kernel->is_indirect;
  return [=, name = kernel->name, is_large = kernel->has_large_registers] {
    const OpenCl& cl = *opencl();
    if (std::getenv("ZSIM_SPILLS")) std::printf("zsim: %s%s\n", name.c_str(), is_large ? " with large registers" : "");
    cl_int result = failed;
    if (!result) result = cl.clEnqueueNDRangeKernel(cl.queue, copy, 3, nullptr, global, local, 0, nullptr, nullptr);
    if (!result) result = cl.clFinish(cl.queue);
    cl.clReleaseKernel(copy);
    if (result || !is_indirect) std::fprintf(stderr, "zsim: %s: OpenCL error %d%s\n", name.c_str(), result,
                                             is_indirect ? "" : ", and no indirect access was asked for");
    return result || !is_indirect ? ZE_RESULT_ERROR_UNKNOWN : ZE_RESULT_SUCCESS;
  };
}

}  // namespace zsim
