// SPDX-License-Identifier: Apache-2.0
// OpenCL on the CPU, on which zsim runs: the library that ZSIM_OPENCL names, opened without its loader.
#pragma once

#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace zsim {

#define ZSIM_OPENCL_FUNCTIONS(X)                                                                                 \
  X(clGetPlatformIDs) X(clGetDeviceIDs) X(clCreateContext) X(clCreateCommandQueueWithProperties)                 \
  X(clCreateProgramWithIL) X(clCreateProgramWithBinary) X(clBuildProgram) X(clCompileProgram) X(clLinkProgram)   \
  X(clReleaseProgram) X(clGetProgramBuildInfo) X(clGetProgramInfo) X(clCreateKernel) X(clCloneKernel)            \
  X(clReleaseKernel) X(clGetKernelInfo) X(clSetKernelArg) X(clEnqueueNDRangeKernel) X(clFinish)                  \
  X(clSetProgramSpecializationConstant)

struct OpenCl {
#define ZSIM_MEMBER(name) decltype(&::name) name;
  ZSIM_OPENCL_FUNCTIONS(ZSIM_MEMBER)
#undef ZSIM_MEMBER
  cl_context context;
  cl_device_id device;
  cl_command_queue queue;
};

// Null where there is none: the driver says then that it has no device.
inline const OpenCl* opencl() {
  static const OpenCl* const found = []() -> const OpenCl* {
    const char* path = std::getenv("ZSIM_OPENCL");
    void* library = path ? dlopen(path, RTLD_NOW | RTLD_GLOBAL) : nullptr;
    if (!library) {
      std::fprintf(stderr, "zsim: no OpenCL: ZSIM_OPENCL=%s: %s\n", path ? path : "", path ? dlerror() : "not set");
      return nullptr;
    }
    auto* made = new OpenCl;
#define ZSIM_FIND(name) made->name = reinterpret_cast<decltype(&::name)>(dlsym(library, #name));
    ZSIM_OPENCL_FUNCTIONS(ZSIM_FIND)
#undef ZSIM_FIND
    cl_platform_id platform;
    cl_int failed = made->clGetPlatformIDs(1, &platform, nullptr);
    if (!failed) failed = made->clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &made->device, nullptr);
    if (!failed) made->context = made->clCreateContext(nullptr, 1, &made->device, nullptr, nullptr, &failed);
    if (!failed) made->queue = made->clCreateCommandQueueWithProperties(made->context, made->device, nullptr, &failed);
    if (!failed) return made;
    std::fprintf(stderr, "zsim: OpenCL in %s: error %d\n", path, failed);
    return nullptr;
  }();
  return found;
}

}  // namespace zsim
