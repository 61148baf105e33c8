/* The CUDA runtime, cuBLAS and NCCL without a device, to be preloaded (LD_PRELOAD) under the CUDA build of torch.

   Memory is address space that nobody touches, kernels and matrix products are counted and not run. Copies are not made
   of more than COPIED bytes, to pinned memory of more than NUMBERS, and from it. Every wait for the device calls back
   into Python, which notes the stack, with the number of kernels that were launched after what is waited for. So torch,
   DeepSpeed, Triton and ptxas run as they do on a GPU, and what a step asks of the device can be read as a table.

   While a stream is captured as a CUDA graph, a wait is an error, as it is on a device; what is counted then is what
   the graph has.

   Values are those of fresh memory: zeros. Not here: device time, cuDNN. */

#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { HANDLES = 1 << 16, COPIED = 4096, NUMBERS = 256, CLEARED = 16 << 20, PAGE = 2 << 20, NAMES = 1 << 13, KERNELS = 1 << 16 };
static const size_t MEMORY = (size_t)143771 << 20; /* of an H200 */

/* --- counters: calls and amounts (bytes or FLOPs) by name ----------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { char *name; long calls; double amount; } counters[NAMES];
static void (*on_wait)(const char *, long);
static long launched; /* kernels so far */

void dry_count(const char *name, double amount) {
    unsigned place = 5381;
    for (const char *at = name; *at; at++) place = place * 33 + (unsigned char)*at;
    pthread_mutex_lock(&lock);
    for (place %= NAMES; counters[place].name && strcmp(counters[place].name, name);) place = (place + 1) % NAMES;
    if (!counters[place].name) counters[place].name = strdup(name);
    counters[place].calls++;
    counters[place].amount += amount;
    pthread_mutex_unlock(&lock);
}

void dry_launch(const char *name, double amount) {
    __sync_add_and_fetch(&launched, 1);
    dry_count(name, amount);
}

void dry_reset(void) {
    pthread_mutex_lock(&lock);
    for (int place = 0; place < NAMES; place++) counters[place].calls = counters[place].amount = 0;
    pthread_mutex_unlock(&lock);
}

void dry_write(const char *path) {
    FILE *file = fopen(path, "w");
    for (int place = 0; place < NAMES; place++)
        if (counters[place].calls)
            fprintf(file, "%ld\t%.17g\t%s\n", counters[place].calls, counters[place].amount, counters[place].name);
    fclose(file);
}

void dry_on_wait(void (*call)(const char *, long)) { on_wait = call; }

static cudaStream_t captured; /* by a graph; 0: none is */

static cudaError_t waits(const char *name, long since) {
    if (captured) return cudaErrorStreamCaptureUnsupported;
    dry_count(name, 0);
    if (on_wait) on_wait(name, since);
    return cudaSuccess;
}

/* --- memory: one arena a kind, never given back ---------------------------------------------------------------------- */

enum { DEVICE, PINNED };
static const size_t ARENA[] = {(size_t)1 << 42, (size_t)1 << 40};
static char *arena[2];
static size_t used[2];

void *dry_take(int kind, size_t size) {
    pthread_mutex_lock(&lock);
    if (!arena[kind]) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        arena[kind] = mmap(0, ARENA[kind], PROT_READ | PROT_WRITE, flags, -1, 0);
        if (arena[kind] == MAP_FAILED) perror("dry CUDA runtime: address space"), abort();
        used[kind] = PAGE;
    }
    void *found = arena[kind] + used[kind];
    used[kind] += (size + PAGE - 1) / PAGE * PAGE;
    pthread_mutex_unlock(&lock);
    return found;
}

static int lies_in(int kind, const void *at) {
    return arena[kind] && (char *)at >= arena[kind] && (char *)at < arena[kind] + ARENA[kind];
}

cudaError_t cudaMalloc(void **at, size_t size) { *at = dry_take(DEVICE, size); dry_count("call cudaMalloc", size); return 0; }
cudaError_t cudaMallocAsync(void **at, size_t size, cudaStream_t stream) { return cudaMalloc(at, size); }
cudaError_t cudaHostAlloc(void **at, size_t size, unsigned flags) {
    *at = dry_take(PINNED, size);
    dry_count("call cudaHostAlloc", size);
    return 0;
}
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) { *total = *left = MEMORY; return 0; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
    memset(found, 0, sizeof *found);
    int on_device = lies_in(DEVICE, at), is_pinned = lies_in(PINNED, at);
    found->type = on_device ? cudaMemoryTypeDevice : is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    if (on_device || is_pinned) found->devicePointer = (void *)at;
    if (is_pinned) found->hostPointer = (void *)at;
    return 0;
}
cudaError_t cudaGetSymbolAddress(void **at, const void *symbol) { *at = dry_take(DEVICE, PAGE); return 0; }

static cudaError_t copy(void *to, const void *from, size_t size) {
    const char *kind = "copy on the host";
    if (lies_in(DEVICE, to) && lies_in(DEVICE, from)) kind = "copy on the device";
    else if (lies_in(DEVICE, to)) kind = lies_in(PINNED, from) ? "copy to the device" : "copy to the device, pageable";
    else if (lies_in(DEVICE, from)) kind = lies_in(PINNED, to) ? "copy to the host" : "copy to the host, pageable";
    dry_count(kind, size);
    if (lies_in(DEVICE, to) && lies_in(PINNED, from)) return 0; /* batches: their bytes are no numbers of a kernel */
    /* Tensors that the host reads, as an optimizer there does, are zeros: on the device is what was there before. */
    size_t most = lies_in(DEVICE, from) && lies_in(PINNED, to) ? NUMBERS : COPIED;
    if (size <= most) memmove(to, from, size);
    else if (size <= CLEARED && lies_in(DEVICE, from) && !lies_in(DEVICE, to)) memset(to, 0, size);
    return 0;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, size);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    copy(to, from, size);
    return waits("cudaMemcpy", 0);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, cudaStream_t stream) {
    return copy(to, from, size);
}
cudaError_t cudaMemset(void *at, int value, size_t size) {
    dry_count("fill", size);
    if (size <= COPIED) memset(at, value, size);
    return 0;
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream) { return cudaMemset(at, value, size); }

/* --- the device: an H200 --------------------------------------------------------------------------------------------- */

static __thread int current;
cudaError_t cudaGetDeviceCount(int *count) {
    const char *asked = getenv("DRY_DEVICES");
    *count = asked ? atoi(asked) : 1;
    return 0;
}
cudaError_t cudaGetDevice(int *device) { *device = current; return 0; }
cudaError_t cudaSetDevice(int device) { current = device; return 0; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "NVIDIA H200");
    found->major = 9;
    found->totalGlobalMem = MEMORY;
    found->multiProcessorCount = 132;
    found->sharedMemPerBlock = 48 << 10;
    found->sharedMemPerBlockOptin = 227 << 10;
    found->sharedMemPerMultiprocessor = 228 << 10;
    found->regsPerBlock = found->regsPerMultiprocessor = 64 << 10;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = 2048;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = INT32_MAX;
    found->maxGridSize[1] = found->maxGridSize[2] = UINT16_MAX;
    found->l2CacheSize = 60 << 20;
    found->memoryBusWidth = 6144;
    found->maxBlocksPerMultiProcessor = 32;
    found->textureAlignment = 512;
    found->unifiedAddressing = found->canMapHostMemory = 1;
    found->pciBusID = 1 + device;
    return 0;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    switch ((int)which) {
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 << 10; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = 64 << 10; break;
        case 128: *value = 0; break; /* fabric handles, for which torch would ask NVML */
        default: *value = 1;
    }
    return 0;
}
cudaError_t cudaDeviceGetPCIBusId(char *found, int size, int device) { snprintf(found, size, "0000:%02x:00.0", device + 1); return 0; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return 0; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return 0; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { *pool = (void *)1; return 0; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value) { *(uint64_t *)value = 0; return 0; }

/* --- streams and events: all work is done when it is queued ---------------------------------------------------------- */

static long recorded[HANDLES]; /* by event: the kernels launched before it */
static long *record_of(cudaEvent_t event) { return &recorded[((uintptr_t)event / 16) % HANDLES]; }

static cudaError_t new_handle(void **handle) {
    static uintptr_t last = 16;
    *handle = (void *)__sync_add_and_fetch(&last, 16);
    return 0;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { return new_handle((void **)stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return new_handle((void **)stream); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return new_handle((void **)event); }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return new_handle((void **)event); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { *record_of(event) = launched; return 0; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { *ms = 1; return 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = captured && stream == captured;
    return 0;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    if (status) *status = captured && stream == captured;
    if (id) *id = 1;
    if (graph) *graph = (cudaGraph_t)1;
    if (count) *count = 0;
    return 0;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) { captured = stream; return 0; }
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) { captured = 0; return new_handle((void **)graph); }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { *count = 1; return 0; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *ready, cudaGraph_t graph, unsigned long long flags) {
    return new_handle((void **)ready);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream) { dry_count("graph", 0); return 0; }
cudaError_t cudaDeviceSynchronize(void) { return waits("cudaDeviceSynchronize", 0); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (captured && stream != captured) return 0; /* capture_begin of torch */
    return waits("cudaStreamSynchronize", 0);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return waits("cudaEventSynchronize", launched - *record_of(event)); }

/* --- kernels: counted by the names that they are registered with ----------------------------------------------------- */

static struct { const void *function; char *name; } kernels[KERNELS];

static unsigned place_of(const void *function) {
    unsigned place = ((uintptr_t)function >> 3) % KERNELS;
    while (kernels[place].function && kernels[place].function != function) place = (place + 1) % KERNELS;
    return place;
}
void __cudaRegisterFunction(void **module, const char *function, char *a, const char *name, int b, void *c, void *d, void *e, void *f, int *g) {
    pthread_mutex_lock(&lock);
    unsigned place = place_of(function);
    kernels[place].function = function;
    kernels[place].name = strdup(name);
    pthread_mutex_unlock(&lock);
}
static cudaError_t launch(const void *function) {
    char name[1024];
    const char *known = kernels[place_of(function)].name;
    snprintf(name, sizeof name, "kernel %.1000s", known ? known : "unknown");
    dry_launch(name, 0);
    return 0;
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **given, size_t shared, cudaStream_t stream) { return launch(function); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **given) { return launch(function); }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; return 0; }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **given, size_t shared, cudaStream_t stream) { return launch(kernel); }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->binaryVersion = found->ptxVersion = 90;
    found->numRegs = 32;
    found->maxDynamicSharedSizeBytes = 227 << 10;
    return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size, size_t shared, unsigned flags) { *blocks = 2; return 0; }

/* Driver functions that are asked for through the runtime; the others are in driver.c. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    extern void *dry_driver(const char *);
    *function = dry_driver(name);
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return 0;
}

/* --- cuBLAS: products by FLOPs ---------------------------------------------------------------------------------------- */

int cublasCreate_v2(void **handle) { *handle = calloc(1, 1 << 16); return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }

static int product(const char *kind, double m, double n, double k, double batch) {
    char name[64];
    snprintf(name, sizeof name, "product %s", kind);
    dry_launch(name, 2 * m * n * k * batch);
    return 0;
}
int cublasGemmEx(void *h, int ta, int tb, int m, int n, int k) { return product("16 bits", m, n, k, 1); }
int cublasSgemmEx(void *h, int ta, int tb, int m, int n, int k) { return product("16 bits", m, n, k, 1); }
int cublasSgemm_v2(void *h, int ta, int tb, int m, int n, int k) { return product("fp32", m, n, k, 1); }
int cublasDgemm_v2(void *h, int ta, int tb, int m, int n, int k) { return product("fp64", m, n, k, 1); }
int cublasGemmStridedBatchedEx(void *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int at, int lda, long long sa,
                               const void *b, int bt, int ldb, long long sb, const void *beta, void *c, int ct, int ldc, long long sc, int batch) {
    return product("16 bits", m, n, k, batch);
}
int cublasSgemmStridedBatched(void *h, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda, long long sa,
                              const float *b, int ldb, long long sb, const float *beta, float *c, int ldc, long long sc, int batch) {
    return product("fp32", m, n, k, batch);
}
int cublasDotEx(void) { return product("dot", 0, 0, 0, 0); }
int cublasSdot_v2(void) { return product("dot", 0, 0, 0, 0); }
int cublasLtMatmul(void) { return product("cublasLt", 0, 0, 0, 0); }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int asked, void *results, int *found) {
    *found = 1;
    memset(results, 0, 128);
    return 0;
}

/* --- NCCL: bytes by collective and dtype; every rank holds what this one holds ---------------------------------------- */

struct comm { int size; };
struct unique { char bytes[128]; };
static int connect(struct comm **comm, int size) { *comm = calloc(1, 4096), (*comm)->size = size; return 0; }
int ncclGetUniqueId(struct unique *id) { memset(id, 7, sizeof *id); return 0; }
int ncclCommInitRank(struct comm **comm, int size, struct unique id, int rank) { return connect(comm, size); }
int ncclCommInitRankConfig(struct comm **comm, int size, struct unique id, int rank, void *config) { return connect(comm, size); }
int ncclCommInitRankScalable(struct comm **comm, int size, int rank, int count, void *ids, void *config) { return connect(comm, size); }
int ncclCommSplit(struct comm *from, int color, int key, struct comm **comm, void *config) { return connect(comm, from->size); }
int ncclCommGetAsyncError(void *comm, int *error) { *error = 0; return 0; }
int ncclCommCount(struct comm *comm, int *count) { *count = comm->size; return 0; }
int ncclCommUserRank(void *comm, int *rank) { *rank = 0; return 0; }
int ncclCommRegister(void *comm, void *at, size_t size, void **handle) { *handle = 0; return 0; }
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int dtype, int where, void *comm) { *op = 5; return 0; }

static const char *DTYPES[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "fp16", "fp32", "fp64", "bf16"};
static const int SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

static int collective(const char *kind, const void *from, void *to, size_t count, int dtype, int parts) {
    char name[64];
    snprintf(name, sizeof name, "%s of %s", kind, DTYPES[dtype]);
    size_t size = count * SIZES[dtype];
    dry_count(name, (double)size * parts);
    for (int part = 0; size <= COPIED && part < parts; part++) memmove((char *)to + part * size, from, size);
    return 0;
}
int ncclAllReduce(const void *from, void *to, size_t count, int dtype, int op, struct comm *comm, void *stream) { return collective("all-reduce", from, to, count, dtype, 1); }
int ncclReduce(const void *from, void *to, size_t count, int dtype, int op, int root, struct comm *comm, void *stream) { return collective("reduce", from, to, count, dtype, 1); }
int ncclBroadcast(const void *from, void *to, size_t count, int dtype, int root, struct comm *comm, void *stream) { return collective("broadcast", from, to, count, dtype, 1); }
int ncclBcast(void *at, size_t count, int dtype, int root, struct comm *comm, void *stream) { return collective("broadcast", at, at, count, dtype, 1); }
int ncclAllGather(const void *from, void *to, size_t count, int dtype, struct comm *comm, void *stream) { return collective("all-gather", from, to, count, dtype, comm->size); }
int ncclReduceScatter(const void *from, void *to, size_t count, int dtype, int op, struct comm *comm, void *stream) {
    char name[64];
    snprintf(name, sizeof name, "reduce-scatter of %s", DTYPES[dtype]);
    dry_count(name, (double)count * SIZES[dtype] * comm->size);
    if (count * SIZES[dtype] <= COPIED) memmove(to, from, count * SIZES[dtype]);
    return 0;
}
