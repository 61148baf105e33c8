/* Functions of CUDA that have nothing to do without a device. Apart, because their headers declare other arguments. */

#define NOTHING(name) int name(void) { return 0; }

/* The runtime */
NOTHING(cudaFree) NOTHING(cudaFreeAsync) NOTHING(cudaFreeHost) NOTHING(cudaHostRegister) NOTHING(cudaHostUnregister)
NOTHING(cudaMemcpyToSymbol) NOTHING(cudaDeviceEnablePeerAccess) NOTHING(cudaMemPoolSetAttribute)
NOTHING(cudaGetLastError) NOTHING(cudaPeekAtLastError) NOTHING(cudaStreamDestroy) NOTHING(cudaStreamQuery)
NOTHING(cudaStreamWaitEvent) NOTHING(cudaThreadExchangeStreamCaptureMode) NOTHING(cudaEventQuery) NOTHING(cudaEventDestroy) NOTHING(cudaFuncSetAttribute)
NOTHING(cudaKernelSetAttributeForDevice) NOTHING(cudaGraphDestroy) NOTHING(cudaGraphExecDestroy)

/* The driver */
NOTHING(cuCtxFromGreenCtx) NOTHING(cuCtxGetLimit) NOTHING(cuCtxPopCurrent) NOTHING(cuCtxPushCurrent)
NOTHING(cuCtxPushCurrent_v2) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxSetLimit) NOTHING(cuCtxSynchronize)
NOTHING(cuDevResourceGenerateDesc) NOTHING(cuDevSmResourceSplitByCount) NOTHING(cuDeviceGetDevResource)
NOTHING(cuDevicePrimaryCtxRelease_v2) NOTHING(cuEventCreate) NOTHING(cuEventDestroy_v2) NOTHING(cuEventElapsedTime)
NOTHING(cuEventRecord) NOTHING(cuEventSynchronize) NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig)
NOTHING(cuGreenCtxCreate) NOTHING(cuGreenCtxDestroy) NOTHING(cuGreenCtxStreamCreate) NOTHING(cuInit)
NOTHING(cuKernelSetAttribute) NOTHING(cuLibraryGetKernel) NOTHING(cuLibraryLoadData) NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkComplete) NOTHING(cuLinkCreate_v2) NOTHING(cuLinkDestroy) NOTHING(cuMemAddressFree)
NOTHING(cuMemExportToShareableHandle) NOTHING(cuMemFree_v2) NOTHING(cuMemGetAddressRange)
NOTHING(cuMemGetAllocationPropertiesFromHandle) NOTHING(cuMemGetInfo_v2) NOTHING(cuMemImportFromShareableHandle)
NOTHING(cuMemMap) NOTHING(cuMemRelease) NOTHING(cuMemRetainAllocationHandle) NOTHING(cuMemSetAccess) NOTHING(cuMemUnmap)
NOTHING(cuMemcpyDtoHAsync_v2) NOTHING(cuMemcpyHtoDAsync_v2) NOTHING(cuMemsetD32Async) NOTHING(cuMemsetD8Async)
NOTHING(cuModuleUnload) NOTHING(cuMulticastAddDevice) NOTHING(cuMulticastBindMem) NOTHING(cuMulticastCreate)
NOTHING(cuMulticastUnbind) NOTHING(cuStreamGetCaptureInfo_v2) NOTHING(cuStreamSynchronize) NOTHING(cuStreamWriteValue32)
NOTHING(cuStreamWriteValue32_v2)

/* cuBLAS */
NOTHING(cublasDestroy_v2) NOTHING(cublasSetStream_v2) NOTHING(cublasSetWorkspace_v2) NOTHING(cublasSetMathMode)
NOTHING(cublasSetPointerMode_v2)

/* NCCL */
NOTHING(ncclCommFinalize) NOTHING(ncclCommDestroy) NOTHING(ncclCommAbort) NOTHING(ncclGroupStart) NOTHING(ncclGroupEnd)
NOTHING(ncclCommDeregister) NOTHING(ncclRedOpDestroy)

/* NVML: the fabric state stays 0, not supported */
NOTHING(nvmlInit_v2) NOTHING(nvmlDeviceGetHandleByPciBusId_v2) NOTHING(nvmlDeviceGetGpuFabricInfoV)
NOTHING(nvmlDeviceGetNvLinkRemoteDeviceType) NOTHING(nvmlDeviceGetNvLinkRemotePciInfo_v2) NOTHING(nvmlDeviceGetComputeRunningProcesses)
NOTHING(nvmlSystemGetCudaDriverVersion_v2) NOTHING(nvmlDeviceGetCount_v2) NOTHING(nvmlDeviceGetPciInfo_v3)

/* cuDNN is not part of the runtime: at::Context::userEnabledCuDNNSDP(), so that SDPA takes the kernel after it. */
NOTHING(_ZNK2at7Context19userEnabledCuDNNSDPEv)
