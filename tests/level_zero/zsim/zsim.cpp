// SPDX-License-Identifier: Apache-2.0
// libze_loader.so.1 of a machine whose GPU is OpenCL on the CPU: modules are clCreateProgramWithIL, memory is the
// host's, a launch has run when it returns. What dpas does is a program in OpenCL C (dpas.cl) that is linked to modules
// that call it. Found by LOWBIT_LEVEL_ZERO_PATH. The environment says:
//   LOWBIT_ZSIM_DEVICE=pvc|dg2                       whose dpas the device has; none if this is not set
//   LOWBIT_ZSIM_DPAS=<file>                          dpas.cl
//   LOWBIT_ZSIM_FAIL=<function>:<ze_result_t in hex> that function fails
//   LOWBIT_ZSIM_LOG=<file>                           one line for each module and launch
#define CL_TARGET_OPENCL_VERSION 210
#include <CL/cl.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "level_zero/runtime/api.hpp"

namespace ze = lowbit::level_zero::ze;

struct ze::DriverObject {};
struct ze::DeviceObject {};
struct ze::ContextObject {};
struct ze::CommandListObject {};
struct ze::ModuleObject {
  cl_program program;
};
struct ze::BuildLogObject {
  std::string text;
};
struct ze::KernelObject {
  cl_kernel kernel;
  std::string name;
  size_t threads;
};

namespace {

constexpr uint32_t kDevices = 8;  // as many as there are simulated devices; all are one
constexpr int kBuildFailure = 0x70000004, kLinkFailure = 0x70000005, kUnknown = 0x7ffffffe,
              kInvalidKernelName = 0x78000011, kInvalidArgument = 0x78000004;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

int failure(const char* function) {
  const std::string fail = environment("LOWBIT_ZSIM_FAIL"), wanted = std::string(function) + ":";
  return fail.rfind(wanted, 0) == 0 ? static_cast<int>(std::stoul(fail.substr(wanted.size()), nullptr, 16)) : 0;
}

template <class... Parts>
void log(const Parts&... parts) {
  const std::string path = environment("LOWBIT_ZSIM_LOG");
  if (path.empty()) return;
  std::ofstream file(path, std::ios::app);
  (file << ... << parts) << "\n";
}

struct Machine {
  cl_device_id device = nullptr;
  cl_context context = nullptr;
  cl_command_queue queue = nullptr;

  Machine() {
    cl_platform_id platform = nullptr;
    if (clGetPlatformIDs(1, &platform, nullptr) || clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, nullptr))
      return;
    context = clCreateContext(nullptr, 1, &device, nullptr, nullptr, nullptr);
    queue = clCreateCommandQueueWithProperties(context, device, nullptr, nullptr);
  }
};
Machine& machine() {
  static Machine made;
  return made;
}

std::string build_log(cl_program program) {
  size_t bytes = 0;
  clGetProgramBuildInfo(program, machine().device, CL_PROGRAM_BUILD_LOG, 0, nullptr, &bytes);
  std::string text(bytes, '\0');
  clGetProgramBuildInfo(program, machine().device, CL_PROGRAM_BUILD_LOG, bytes, text.data(), nullptr);
  return text;
}

bool compile(cl_program program, const char* flags, std::string& said) {
  const cl_int failed = clCompileProgram(program, 1, &machine().device, flags, 0, nullptr, nullptr, nullptr, nullptr);
  if (failed) said += build_log(program);
  return failed == 0;
}

cl_program dpas(std::string& said) {
  static cl_program made = nullptr;
  if (made) return made;
  std::ostringstream text;
  text << std::ifstream(environment("LOWBIT_ZSIM_DPAS")).rdbuf();
  const std::string source = text.str();
  const char* start = source.c_str();
  cl_program program = clCreateProgramWithSource(machine().context, 1, &start, nullptr, nullptr);
  return compile(program, "-cl-std=CL2.0", said) ? made = program : nullptr;
}

// Modules, linked, with dpas where one calls it.
int build(const std::vector<std::string_view>& modules, cl_program& program, std::string& said) {
  std::vector<cl_program> parts;
  bool calls_dpas = false;
  for (std::string_view words : modules) {
    cl_program part = clCreateProgramWithIL(machine().context, words.data(), words.size(), nullptr);
    if (!part || !compile(part, "", said)) return kBuildFailure;
    parts.push_back(part);
    calls_dpas |= words.find("_matrix_mad_k") != std::string_view::npos;
  }
  if (calls_dpas && environment("LOWBIT_ZSIM_DEVICE").empty()) return kLinkFailure;
  if (calls_dpas) parts.push_back(dpas(said));
  if (!parts.back()) return kBuildFailure;
  cl_int failed = 0;
  program = clLinkProgram(machine().context, 1, &machine().device, "", static_cast<cl_uint>(parts.size()), parts.data(),
                          nullptr, nullptr, &failed);
  if (failed && program) said += build_log(program);
  return failed ? kLinkFailure : 0;
}

}  // namespace

extern "C" {

void lowbit_emulates_level_zero() {}

int zeInit(uint32_t) { return failure("zeInit"); }

int zeDriverGet(uint32_t* count, ze::Driver* drivers) {
  static ze::DriverObject driver;
  if (drivers) *drivers = &driver;
  *count = 1;
  return failure("zeDriverGet");
}

int zeDeviceGet(ze::Driver, uint32_t* count, ze::Device* devices) {
  static ze::DeviceObject made[kDevices];
  *count = machine().queue ? kDevices : 0;
  for (uint32_t i = 0; devices && i < *count; i++) devices[i] = &made[i];
  return failure("zeDeviceGet");
}

int zeDeviceGetProperties(ze::Device, ze::DeviceProperties* properties) {
  properties->type = 1, properties->vendor_id = 0x8086;
  const std::string name = environment("LOWBIT_ZSIM_DEVICE");
  properties->device_id = name == "dg2" ? 0x5690 : name == "pvc" ? 0x0bd5 : 0x9a49;
  std::strcpy(properties->name, "OpenCL on a CPU");
  return failure("zeDeviceGetProperties");
}

int zeDeviceGetComputeProperties(ze::Device, ze::ComputeProperties* properties) {
  const bool is_pvc = environment("LOWBIT_ZSIM_DEVICE") == "pvc";
  const std::vector<uint32_t> sizes = is_pvc ? std::vector<uint32_t>{16, 32} : std::vector<uint32_t>{8, 16, 32};
  properties->sub_group_size_count = static_cast<uint32_t>(sizes.size());
  for (size_t i = 0; i < sizes.size(); i++) properties->sub_group_sizes[i] = sizes[i];
  return failure("zeDeviceGetComputeProperties");
}

int zeContextCreate(ze::Driver, const ze::ContextDesc*, ze::Context* context) {
  static ze::ContextObject made;
  *context = &made;
  return failure("zeContextCreate");
}

int zeCommandListCreateImmediate(ze::Context, ze::Device, const ze::QueueDesc* desc, ze::CommandList* list) {
  static ze::CommandListObject made;
  *list = &made;
  return desc->mode == ze::kSynchronous ? failure("zeCommandListCreateImmediate") : kInvalidArgument;
}

int zeModuleCreate(ze::Context, ze::Device, const ze::ModuleDesc* desc, ze::Module* module, ze::BuildLog* build_log) {
  const auto* several = static_cast<const ze::ModuleProgramDesc*>(desc->next);
  std::vector<std::string_view> modules;
  for (uint32_t i = 0; i < (several ? several->count : 1); i++)
    modules.emplace_back(reinterpret_cast<const char*>(several ? several->modules[i] : desc->module),
                         several ? several->bytes[i] : desc->bytes);
  auto* said = new ze::BuildLogObject;
  *build_log = said;
  int result = failure("zeModuleCreate");
  cl_program program = nullptr;
  if (result) said->text = "zsim was told to fail";
  else result = build(modules, program, said->text);
  log("module ", modules.size(), " ", result);
  *module = new ze::ModuleObject{program};
  return result;
}

int zeModuleBuildLogGetString(ze::BuildLog build_log, size_t* bytes, char* text) {
  *bytes = build_log->text.size() + 1;
  if (text) std::memcpy(text, build_log->text.c_str(), *bytes);
  return 0;
}

int zeModuleBuildLogDestroy(ze::BuildLog build_log) {
  delete build_log;
  return 0;
}

int zeKernelCreate(ze::Module module, const ze::KernelDesc* desc, ze::Kernel* kernel) {
  cl_kernel made = clCreateKernel(module->program, desc->name, nullptr);
  if (!made) return kInvalidKernelName;
  *kernel = new ze::KernelObject{made, desc->name, 0};
  return failure("zeKernelCreate");
}

int zeKernelSetGroupSize(ze::Kernel kernel, uint32_t x, uint32_t, uint32_t) {
  kernel->threads = x;
  return 0;
}

int zeKernelSetArgumentValue(ze::Kernel kernel, uint32_t index, size_t bytes, const void* value) {
  return clSetKernelArg(kernel->kernel, index, bytes, value) ? kInvalidArgument : 0;
}

int zeKernelSetIndirectAccess(ze::Kernel kernel, uint32_t) {
  const cl_bool yes = CL_TRUE;
  clSetKernelExecInfo(kernel->kernel, CL_KERNEL_EXEC_INFO_SVM_FINE_GRAIN_SYSTEM, sizeof yes, &yes);
  return 0;
}

int zeCommandListAppendLaunchKernel(ze::CommandList, ze::Kernel kernel, const ze::GroupCount* groups, ze::Event,
                                    uint32_t, ze::Event*) {
  if (const int told = failure("zeCommandListAppendLaunchKernel")) return told;
  log("launch ", kernel->name, " ", groups->x, " ", kernel->threads);
  const size_t threads = groups->x * kernel->threads;
  const cl_int failed = clEnqueueNDRangeKernel(machine().queue, kernel->kernel, 1, nullptr, &threads, &kernel->threads,
                                               0, nullptr, nullptr);
  return failed || clFinish(machine().queue) ? kUnknown : 0;
}

int zeCommandListAppendMemoryCopy(ze::CommandList, void* to, const void* from, size_t bytes, ze::Event, uint32_t,
                                  ze::Event*) {
  std::memcpy(to, from, bytes);
  return failure("zeCommandListAppendMemoryCopy");
}

}  // extern "C"
