/* The CUDA driver (libcuda) without a device: for Triton's launcher, torch's allocator and lazy loading of kernels. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICE, PAGE = 2 << 20 };
void *dry_take(int kind, size_t size);
void dry_count(const char *name, double amount);
void dry_launch(const char *name, double amount);
int cudaDeviceGetAttribute(int *value, int which, int device);

void *dry_driver(const char *name) { return dlsym(RTLD_DEFAULT, name); }

int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { return cudaDeviceGetAttribute(value, which, device); }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "NVIDIA H200"); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0, *active = 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = (void *)1; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no error: there is no device"; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "DRY"; return 0; }
int cuPointerGetAttribute(void *value, int which, uintptr_t at) {
    if (which == 3) *(uintptr_t *)value = at; /* the address on the device */
    else *(int *)value = 2;                   /* of the device's memory */
    return 0;
}

/* --- modules: kernels that Triton has compiled; a handle is the name -------------------------------------------------- */

static int load(void **module) { *module = (void *)1; return 0; }
int cuModuleLoad(void **module, const char *path) { return load(module); }
int cuModuleLoadData(void **module, const void *image) { return load(module); }
int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void *values) { return load(module); }
int cuFuncGetModule(void **module, void *function) { return load(module); }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = strdup(name); return 0; }
int cuModuleGetGlobal_v2(void **at, size_t *size, void *module, const char *name) {
    *at = dry_take(DEVICE, PAGE);
    if (size) *size = PAGE;
    return 0;
}
int cuFuncGetAttribute(int *value, int which, void *function) { *value = which == 0 ? 1024 : which == 4 ? 32 : 0; return 0; }
static int launch(const char *function) {
    char name[1024];
    snprintf(name, sizeof name, "compiled kernel %.1000s", function);
    dry_launch(name, 0);
    return 0;
}
int cuLaunchKernel(void *function) { return launch(function); }
int cuLaunchCooperativeKernel(void *function) { return launch(function); }
int cuLaunchKernelEx(const void *config, void *function) { return launch(function); }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks) { *blocks = 2; return 0; }
int cuOccupancyMaxActiveClusters(int *clusters) { *clusters = 2; return 0; }
int cuTensorMapEncodeTiled(void *map) { memset(map, 0, 128); return 0; }
int cuTensorMapEncodeIm2col(void *map) { memset(map, 0, 128); return 0; }

/* --- virtual memory: segments that grow (`expandable_segments`) ------------------------------------------------------- */

int cuMemGetAllocationGranularity(size_t *size) { *size = PAGE; return 0; }
int cuMemAddressReserve(uintptr_t *at, size_t size) { *at = (uintptr_t)dry_take(DEVICE, size); return 0; }
int cuMemCreate(unsigned long long *handle, size_t size) { *handle = 1; dry_count("call cuMemCreate", size); return 0; }
int cuMemAlloc_v2(uintptr_t *at, size_t size) { *at = (uintptr_t)dry_take(DEVICE, size); return 0; }
