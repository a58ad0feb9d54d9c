// SPDX-License-Identifier: Apache-2.0
// libcuda.so.1 of a machine without a GPU: what cuDNN looks up in it to make plans for a device that a text describes.
// Nothing of it does anything.
#define ANSWERS(name) \
  extern "C" __attribute__((visibility("default"))) int name() { return 0; }

ANSWERS(cuCtxGetCurrent)
ANSWERS(cuCtxGetLimit)
ANSWERS(cuCtxPopCurrent)
ANSWERS(cuCtxPushCurrent)
ANSWERS(cuDeviceGet)
ANSWERS(cuGetErrorName)
ANSWERS(cuGetErrorString)
ANSWERS(cuKernelGetAttribute)
ANSWERS(cuKernelSetAttribute)
ANSWERS(cuLaunchCooperativeKernel)
ANSWERS(cuLaunchKernel)
ANSWERS(cuLaunchKernelEx)
ANSWERS(cuLibraryGetKernel)
ANSWERS(cuLibraryLoadData)
ANSWERS(cuLibraryLoadFromFile)
ANSWERS(cuLibraryUnload)
ANSWERS(cuLinkAddData)
ANSWERS(cuLinkComplete)
ANSWERS(cuLinkCreate)
ANSWERS(cuLinkDestroy)
ANSWERS(cuOccupancyMaxPotentialClusterSize)
ANSWERS(cuStreamGetCtx)

extern "C" __attribute__((visibility("default"))) int cuInit(unsigned) { return 100; }  // CUDA_ERROR_NO_DEVICE
extern "C" __attribute__((visibility("default"))) int cuDeviceGetCount(int* count) { return *count = 0, 0; }
extern "C" __attribute__((visibility("default"))) int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
