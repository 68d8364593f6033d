/* A stand-in for libcuda.so.1: NIXL 0.5.1 to 0.9.0 link their UCX plugin with it, and so does the CUDA module of the UCX inside
 * the wheels. Every call answers CUDA_ERROR_NO_DEVICE, as on a machine without a GPU; transfers in main memory need none of it. */
#define NO_DEVICE(name) int name(void) { return 100; }
#define NAMES(do)                                                                                                           \
    do(cuCtxCreate_v2) do(cuCtxDestroy_v2) do(cuCtxGetCurrent) do(cuCtxGetDevice) do(cuCtxGetId) do(cuCtxPopCurrent_v2)     \
    do(cuCtxPushCurrent_v2) do(cuCtxSetCurrent) do(cuCtxSetFlags) do(cuDeviceCanAccessPeer) do(cuDeviceGet)                 \
    do(cuDeviceGetAttribute) do(cuDeviceGetCount) do(cuDeviceGetName) do(cuDeviceGetPCIBusId) do(cuDeviceGetUuid)           \
    do(cuDevicePrimaryCtxGetState) do(cuDevicePrimaryCtxRelease_v2) do(cuDevicePrimaryCtxRetain) do(cuDeviceTotalMem_v2)    \
    do(cuEventCreate) do(cuEventDestroy_v2) do(cuEventQuery) do(cuEventRecord) do(cuGetErrorName) do(cuGetErrorString)      \
    do(cuGetProcAddress_v2) do(cuInit) do(cuIpcCloseMemHandle) do(cuIpcGetMemHandle) do(cuIpcOpenMemHandle_v2)              \
    do(cuMemAddressFree) do(cuMemAddressReserve) do(cuMemAllocManaged) do(cuMemAlloc_v2) do(cuMemCreate)                    \
    do(cuMemExportToShareableHandle) do(cuMemFree_v2) do(cuMemGetAddressRange_v2) do(cuMemGetAllocationGranularity)         \
    do(cuMemGetAllocationPropertiesFromHandle) do(cuMemGetHandleForAddressRange) do(cuMemHostGetDevicePointer_v2)           \
    do(cuMemHostRegister_v2) do(cuMemHostUnregister) do(cuMemImportFromShareableHandle) do(cuMemMap) do(cuMemPoolDestroy)   \
    do(cuMemPoolExportPointer) do(cuMemPoolExportToShareableHandle) do(cuMemPoolImportFromShareableHandle)                  \
    do(cuMemPoolImportPointer) do(cuMemPoolSetAccess) do(cuMemRangeGetAttribute) do(cuMemRelease)                           \
    do(cuMemRetainAllocationHandle) do(cuMemSetAccess) do(cuMemUnmap) do(cuMemcpyAsync) do(cuMemcpyDtoDAsync_v2)            \
    do(cuMemcpyDtoH_v2) do(cuMemcpyHtoD_v2) do(cuMemsetD8_v2) do(cuPointerGetAttribute) do(cuPointerGetAttributes)          \
    do(cuPointerSetAttribute) do(cuStreamAddCallback) do(cuStreamCreate) do(cuStreamDestroy_v2) do(cuStreamSynchronize)
NAMES(NO_DEVICE)
