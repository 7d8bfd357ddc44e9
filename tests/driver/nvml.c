/* A stand-in for NVIDIA's driver: the part of libnvidia-ml.so.1 that Trainmedic calls, for machines without a GPU.
 *
 * The real pynvml loads it. The GPUs live in a file that every process maps (NVML_STANDIN names it), so that
 * their limits and temperatures outlive processes, as they do in a driver; tests/driver/driver.py makes and
 * changes that file. Every attempt to set a power limit is one line of <file>.log.
 *
 * What it models
 *   - power: between idle and peak draw by load, cut off at the limit, at once
 *   - temperature: dT/dt = (ambient + resistance * power - T) / inertia, solved exactly; time can run faster
 *   - constraints of the limit, its default, and its loss when the driver is loaded anew (`generation`)
 *   - throttle reasons of power and heat, MIG mode, ECC counters, remapped rows, XID events
 *   - PCIe width, generation and replays, NVLinks up and their errors, as far as they are set
 *   - the energy drawn and the recovery action that the driver asks for, both gone after a reset
 *   - which processes compute on a GPU, as far as it is told
 *   - a GPU that is lost (every call says so) or absent (it is not there, and the others' indices move up)
 *   - faults on demand: a call of a GPU fails, before or after its effect, is slow, hangs, or kills its caller
 *
 * What it does not model
 *   - who may set limits: the real driver wants root; ask for that fault where it matters
 *   - throttling itself: a GPU that reports thermal slowdown draws as much as before
 *   - persistence mode, beyond its being on or off: limits outlive all clients
 *   - voltage, clocks that follow power, fans, traffic over links, MIG and vGPU devices, the leakage by which
 *     a hot GPU draws more, sensors' noise and delay, and limits that the driver rounds
 *   - stale handles beyond answering NVML_ERROR_INVALID_ARGUMENT: the real library may crash
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15
};
enum { MOST_GPUS = 16, MOST_FAULTS = 16, MOST_XIDS = 16, MOST_PROCESSES = 16 };

/* driver.py has the same layout; `size` in the header holds the two together. */
struct fault {
    char function[64]; /* empty: this place is free */
    int32_t gpu;       /* its place in the file, or -1 for any and for calls of no GPU */
    int32_t code;      /* what the call returns; 0: it goes on as usual */
    int32_t left;      /* how many more times; -1: always */
    int32_t after;     /* 1: the call takes its effect first */
    int32_t kill;      /* 1: SIGKILL to the caller */
    int32_t hang;      /* 1: the call does not come back for as long as this stands */
    uint32_t delay_ms;
    uint32_t tripped; /* how often it has struck */
};

struct gpu {
    char uuid[96];
    char name[96];
    uint32_t domain, bus, device;
    uint32_t min_mw, max_mw, default_mw, limit_mw; /* min_mw = 0: power management is not supported */
    uint32_t idle_mw, peak_mw;
    int32_t slowdown_celsius;
    int32_t mig; /* -1: cannot; 0: off; 1: on */
    int32_t lost, absent;
    uint32_t recovery_action; /* nvmlDeviceGpuRecoveryAction_t; ~0: this driver does not know the field */
    uint32_t sm_mhz, memory_mhz;
    uint32_t xid_count;
    uint32_t process_count;
    uint32_t processes[MOST_PROCESSES];
    uint32_t remapped[4]; /* corrected, uncorrected, pending, failed */
    uint32_t pcie[4];     /* width, its maximum, generation, its maximum */
    uint32_t pcie_replays;
    uint32_t nvlinks, nvlinks_up, nvlink_errors; /* nvlinks = 0: the card has none */
    uint32_t performance_state;
    uint32_t persistence; /* 1: on */
    double load;          /* 0 to 1 */
    double ambient, kelvin_per_watt, inertia;
    double temperature;
    double energy_mj; /* drawn since the driver was loaded or the GPU was reset; below 0: the card does not count it */
    int64_t at_ns; /* when `temperature` and `energy_mj` were true */
    uint64_t memory_total, memory_reserved, memory_used;
    uint64_t ecc[2][2]; /* by counter (volatile, aggregate) and type (corrected, uncorrected) */
    uint64_t more_reasons;
    uint64_t xids[MOST_XIDS]; /* the last ones, by xid_count modulo MOST_XIDS */
};

struct state {
    uint64_t size;
    uint64_t generation;
    double speed;
    uint32_t count;
    uint32_t loaded;
    char driver[80];
    struct fault faults[MOST_FAULTS];
    struct gpu gpus[MOST_GPUS];
};

struct event_set {
    uint32_t gpus; /* bits */
    uint32_t seen[MOST_GPUS];
};

struct pci_info {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};
struct utilization { unsigned gpu, memory; };
struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct temperature { unsigned version, sensor; int celsius; };
struct process { unsigned pid; unsigned long long memory; unsigned instance, compute; };
struct event { void *device; unsigned long long type, data; unsigned instance, compute; };
struct field {
    uint32_t id, scope;
    int64_t timestamp, latency;
    unsigned type, result;
    union { double real; unsigned integer; unsigned long long wide; } value;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct state *state; /* NULL while the library is not initialised */
static int file = -1, log_file = -1, references;
static uint64_t generation; /* of the driver, when this process initialised the library */

/* --- the file, one caller at a time ------------------------------------------------------------------ */

static void enter(void)
{
    pthread_mutex_lock(&mutex); /* threads of one process share the lock on the file */
    while (state && flock(file, LOCK_EX) && errno == EINTR)
        ;
}

static int leave(int result)
{
    if (state)
        flock(file, LOCK_UN); /* the kernel does this for a process that is killed */
    pthread_mutex_unlock(&mutex);
    return result;
}

static void release(void)
{
    munmap(state, sizeof *state);
    close(file);
    close(log_file);
    state = NULL;
}

static int open_state(void)
{
    const char *path = getenv("NVML_STANDIN");
    char log_path[4096];
    struct stat found;
    if (!path || snprintf(log_path, sizeof log_path, "%s.log", path) >= (int)sizeof log_path)
        return DRIVER_NOT_LOADED;
    file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return DRIVER_NOT_LOADED;
    void *mapped = MAP_FAILED;
    if (!fstat(file, &found) && found.st_size == (off_t)sizeof *state)
        mapped = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    log_file = open(log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (mapped == MAP_FAILED || ((struct state *)mapped)->size != sizeof *state || log_file < 0) {
        close(file);
        return DRIVER_NOT_LOADED;
    }
    state = mapped;
    generation = state->generation;
    return SUCCESS;
}

/* --- faults ------------------------------------------------------------------------------------------ */

static struct fault *fault_of(const char *function, int gpu, int after)
{
    for (int i = 0; i < MOST_FAULTS; i++) {
        struct fault *one = &state->faults[i];
        if (one->left != 0 && one->after == after && (one->gpu == -1 || one->gpu == gpu) &&
            !strcmp(one->function, function))
            return one;
    }
    return NULL;
}

/* What is asked to happen before or after the effect of a call. Sleeps without the lock. */
static int trip(const char *function, int gpu, int after)
{
    struct fault *found = fault_of(function, gpu, after);
    if (!found)
        return SUCCESS;
    struct fault fault = *found;
    found->tripped++;
    if (fault.left > 0)
        found->left--;
    if (fault.kill)
        kill(getpid(), SIGKILL);
    if (fault.delay_ms || fault.hang) {
        struct state *mapped = state;
        flock(file, LOCK_UN);
        pthread_mutex_unlock(&mutex);
        usleep(fault.delay_ms * 1000);
        while (fault.hang && mapped == state && *(volatile int32_t *)&found->hang)
            usleep(5000);
        enter();
        if (!state)
            return UNINITIALIZED;
    }
    return fault.code;
}

/* Every call of the library begins with this. */
static int begin(const char *function, int gpu)
{
    enter();
    if (!state || generation != state->generation)
        return UNINITIALIZED;
    if (!state->loaded)
        return DRIVER_NOT_LOADED;
    return trip(function, gpu, 0);
}

/* --- GPUs -------------------------------------------------------------------------------------------- */

/* A handle is no address: generation and place. */
static void *handle_of(int place) { return (void *)(uintptr_t)((generation << 12) | ((uintptr_t)(place + 1) << 4)); }

static int place_of(void *handle)
{
    uintptr_t value = (uintptr_t)handle;
    int place = (int)((value >> 4) & 0xff) - 1;
    return !state || value >> 12 != generation || place < 0 || place >= (int)state->count ? -1 : place;
}

static double power_of(const struct gpu *gpu)
{
    double wanted = gpu->idle_mw + gpu->load * (gpu->peak_mw - gpu->idle_mw);
    return gpu->min_mw && wanted > gpu->limit_mw ? gpu->limit_mw : wanted;
}

/* Bring the temperature up to now. Called before anything that changes the power. */
static void warm(struct gpu *gpu)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    double seconds = (ns - gpu->at_ns) / 1e9 * state->speed;
    double target = gpu->ambient + gpu->kelvin_per_watt * power_of(gpu) / 1000;
    if (seconds > 0 && gpu->energy_mj >= 0)
        gpu->energy_mj += power_of(gpu) * seconds;
    if (seconds > 0)
        gpu->temperature = target + (gpu->temperature - target) * exp(-seconds / gpu->inertia);
    gpu->at_ns = ns;
}

/* Begin a call of a device; `gpu` is set where the result is SUCCESS. */
static int begin_device(const char *function, void *handle, struct gpu **gpu)
{
    int place = place_of(handle);
    int result = begin(function, place);
    if (result != SUCCESS)
        return result;
    if (place < 0)
        return INVALID_ARGUMENT;
    if (state->gpus[place].absent)
        return NOT_FOUND;
    if (state->gpus[place].lost)
        return GPU_IS_LOST;
    *gpu = &state->gpus[place];
    warm(*gpu);
    return SUCCESS;
}

#define DEVICE(handle)                                              \
    struct gpu *gpu = NULL;                                         \
    do {                                                            \
        int begun = begin_device(__func__, handle, &gpu);           \
        if (begun != SUCCESS)                                       \
            return leave(begun);                                    \
    } while (0)

static int text(char *to, unsigned size, const char *from)
{
    if (strlen(from) + 1 > size)
        return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

/* --- the library --------------------------------------------------------------------------------------- */

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&mutex);
    int result = SUCCESS;
    if (references == 0)
        result = open_state();
    if (result == SUCCESS) {
        while (flock(file, LOCK_EX) && errno == EINTR)
            ;
        result = trip(__func__, -1, 0);
        if (result == SUCCESS && !state->loaded)
            result = DRIVER_NOT_LOADED;
        flock(file, LOCK_UN);
        if (result == SUCCESS)
            references++;
        else if (references == 0)
            release();
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void)
{
    pthread_mutex_lock(&mutex);
    int result = references ? SUCCESS : UNINITIALIZED;
    if (references && --references == 0)
        release();
    pthread_mutex_unlock(&mutex);
    return result;
}

const char *nvmlErrorString(int code)
{
    static _Thread_local char told[48];
    snprintf(told, sizeof told, "stand-in error %d", code);
    return told;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size)
{
    int result = begin(__func__, -1);
    return leave(result != SUCCESS ? result : text(version, size, state->driver));
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    int result = begin(__func__, -1);
    if (result == SUCCESS) {
        *count = 0;
        for (unsigned i = 0; i < state->count; i++)
            *count += !state->gpus[i].absent;
    }
    return leave(result);
}

/* As the real one does, a lost GPU gives no handle. */
static int give(const char *function, int place, void **handle)
{
    if (place < 0)
        return leave(NOT_FOUND);
    int result = trip(function, place, 0);
    if (result == SUCCESS && state->gpus[place].lost)
        result = GPU_IS_LOST;
    if (result == SUCCESS)
        *handle = handle_of(place);
    return leave(result);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    int result = begin("", -1), place = -1;
    if (result != SUCCESS)
        return leave(result);
    for (unsigned i = 0; i < state->count && place < 0; i++)
        if (!state->gpus[i].absent && index-- == 0)
            place = (int)i;
    return place < 0 ? leave(INVALID_ARGUMENT) : give(__func__, place, handle);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    int result = begin("", -1), place = -1;
    if (result != SUCCESS)
        return leave(result);
    for (unsigned i = 0; i < state->count; i++)
        if (!state->gpus[i].absent && !strcmp(uuid, state->gpus[i].uuid))
            place = (int)i;
    return give(__func__, place, handle);
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size)
{
    DEVICE(handle);
    return leave(text(uuid, size, gpu->uuid));
}

int nvmlDeviceGetName(void *handle, char *name, unsigned size)
{
    DEVICE(handle);
    return leave(text(name, size, gpu->name));
}

int nvmlDeviceGetIndex(void *handle, unsigned *index)
{
    DEVICE(handle);
    *index = 0;
    for (struct gpu *one = state->gpus; one < gpu; one++)
        *index += !one->absent;
    return leave(SUCCESS);
}

int nvmlDeviceGetPciInfo_v3(void *handle, struct pci_info *pci)
{
    DEVICE(handle);
    memset(pci, 0, sizeof *pci);
    pci->domain = gpu->domain;
    pci->bus = gpu->bus;
    pci->device = gpu->device;
    snprintf(pci->legacy, sizeof pci->legacy, "%04X:%02X:%02X.0", gpu->domain & 0xffff, gpu->bus & 0xff,
             gpu->device & 0xff);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", gpu->domain, gpu->bus & 0xff, gpu->device & 0xff);
    return leave(SUCCESS);
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
    DEVICE(handle);
    if (gpu->mig < 0)
        return leave(NOT_SUPPORTED);
    *current = *pending = (unsigned)gpu->mig;
    return leave(SUCCESS);
}

/* --- power --------------------------------------------------------------------------------------------- */

static int power_value(const struct gpu *gpu, unsigned value, unsigned *to)
{
    if (!gpu->min_mw)
        return leave(NOT_SUPPORTED);
    *to = value;
    return leave(SUCCESS);
}

int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *limit)
{
    DEVICE(handle);
    return power_value(gpu, gpu->limit_mw, limit);
}

int nvmlDeviceGetPersistenceMode(void *handle, int *mode)
{
    DEVICE(handle);
    *mode = (int)gpu->persistence;
    return leave(SUCCESS);
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *limit)
{
    DEVICE(handle);
    return power_value(gpu, gpu->limit_mw, limit);
}

int nvmlDeviceGetPowerManagementDefaultLimit(void *handle, unsigned *limit)
{
    DEVICE(handle);
    return power_value(gpu, gpu->default_mw, limit);
}

int nvmlDeviceGetPowerManagementLimitConstraints(void *handle, unsigned *min, unsigned *max)
{
    DEVICE(handle);
    *max = gpu->max_mw;
    return power_value(gpu, gpu->min_mw, min);
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *power)
{
    DEVICE(handle);
    *power = (unsigned)power_of(gpu);
    return leave(SUCCESS);
}

static void write_log(int place, unsigned limit, int result)
{
    struct timespec now;
    char line[160];
    clock_gettime(CLOCK_REALTIME, &now);
    int length = snprintf(line, sizeof line, "%lld.%09ld %ld %d %u %d\n", (long long)now.tv_sec, now.tv_nsec,
                          (long)getpid(), place, limit, result);
    if (write(log_file, line, (size_t)length) != length)
        abort();
}

int nvmlDeviceSetPowerManagementLimit(void *handle, unsigned limit)
{
    struct gpu *gpu = NULL;
    int place = place_of(handle);
    int result = begin_device(__func__, handle, &gpu);
    if (result == SUCCESS && !gpu->min_mw)
        result = NOT_SUPPORTED;
    if (result == SUCCESS && (limit < gpu->min_mw || limit > gpu->max_mw))
        result = INVALID_ARGUMENT;
    if (result == SUCCESS) {
        gpu->limit_mw = limit;
        write_log(place, limit, result);
        return leave(trip(__func__, place, 1));
    }
    if (state)
        write_log(place, limit, result);
    return leave(result);
}

/* --- readings ------------------------------------------------------------------------------------------ */

int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *celsius)
{
    DEVICE(handle);
    if (sensor != 0)
        return leave(INVALID_ARGUMENT);
    *celsius = (unsigned)lround(gpu->temperature);
    return leave(SUCCESS);
}

int nvmlDeviceGetTemperatureV(void *handle, struct temperature *asked)
{
    DEVICE(handle);
    asked->celsius = (int)lround(gpu->temperature);
    return leave(SUCCESS);
}

int nvmlDeviceGetTemperatureThreshold(void *handle, unsigned which, unsigned *celsius)
{
    DEVICE(handle);
    if (which > 1)
        return leave(NOT_SUPPORTED);
    *celsius = (unsigned)(which == 0 ? gpu->slowdown_celsius + 3 : gpu->slowdown_celsius); /* shutdown, slowdown */
    return leave(SUCCESS);
}

int nvmlDeviceGetUtilizationRates(void *handle, struct utilization *rates)
{
    DEVICE(handle);
    if (gpu->mig == 1)
        return leave(NOT_SUPPORTED);
    rates->gpu = (unsigned)lround(gpu->load * 100);
    rates->memory = rates->gpu / 2;
    return leave(SUCCESS);
}

/* The first version counts what the driver reserves as used. */
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory)
{
    DEVICE(handle);
    memory->total = gpu->memory_total;
    memory->used = gpu->memory_used + gpu->memory_reserved;
    memory->free = memory->total - memory->used;
    return leave(SUCCESS);
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory)
{
    DEVICE(handle);
    memory->total = gpu->memory_total;
    memory->reserved = gpu->memory_reserved;
    memory->used = gpu->memory_used;
    memory->free = memory->total - memory->used - memory->reserved;
    return leave(SUCCESS);
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons)
{
    DEVICE(handle);
    *reasons = gpu->more_reasons;
    if (gpu->load == 0)
        *reasons |= 0x1; /* idle */
    if (gpu->min_mw && gpu->idle_mw + gpu->load * (gpu->peak_mw - gpu->idle_mw) > gpu->limit_mw)
        *reasons |= 0x4; /* software power cap */
    if (gpu->temperature >= gpu->slowdown_celsius - 2)
        *reasons |= 0x20; /* software thermal slowdown */
    if (gpu->temperature >= gpu->slowdown_celsius)
        *reasons |= 0x8 | 0x40; /* hardware slowdown, and that it is thermal */
    return leave(SUCCESS);
}

int nvmlDeviceGetClockInfo(void *handle, unsigned type, unsigned *mhz)
{
    DEVICE(handle);
    *mhz = type == 2 ? gpu->memory_mhz : gpu->sm_mhz;
    return leave(SUCCESS);
}

int nvmlDeviceGetTotalEccErrors(void *handle, unsigned type, unsigned counter, unsigned long long *count)
{
    DEVICE(handle);
    if (type > 1 || counter > 1)
        return leave(INVALID_ARGUMENT);
    *count = gpu->ecc[counter][type];
    return leave(SUCCESS);
}

int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed)
{
    DEVICE(handle);
    *corrected = gpu->remapped[0];
    *uncorrected = gpu->remapped[1];
    *pending = gpu->remapped[2];
    *failed = gpu->remapped[3];
    return leave(SUCCESS);
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *processes)
{
    DEVICE(handle);
    unsigned room = *count;
    *count = gpu->process_count;
    if (room < gpu->process_count)
        return leave(INSUFFICIENT_SIZE);
    for (unsigned i = 0; i < gpu->process_count; i++)
        processes[i] = (struct process){gpu->processes[i], 0, ~0u, ~0u};
    return leave(SUCCESS);
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules)
{
    DEVICE(handle);
    if (gpu->energy_mj < 0)
        return leave(NOT_SUPPORTED);
    *millijoules = (unsigned long long)gpu->energy_mj;
    return leave(SUCCESS);
}

/* --- links ---------------------------------------------------------------------------------------------- */

static int pcie_value(const struct gpu *gpu, int which, unsigned *to)
{
    *to = gpu->pcie[which];
    return leave(SUCCESS);
}

int nvmlDeviceGetCurrPcieLinkWidth(void *handle, unsigned *width)
{
    DEVICE(handle);
    return pcie_value(gpu, 0, width);
}

int nvmlDeviceGetMaxPcieLinkWidth(void *handle, unsigned *width)
{
    DEVICE(handle);
    return pcie_value(gpu, 1, width);
}

int nvmlDeviceGetCurrPcieLinkGeneration(void *handle, unsigned *generation_)
{
    DEVICE(handle);
    return pcie_value(gpu, 2, generation_);
}

int nvmlDeviceGetMaxPcieLinkGeneration(void *handle, unsigned *generation_)
{
    DEVICE(handle);
    return pcie_value(gpu, 3, generation_);
}

int nvmlDeviceGetPcieReplayCounter(void *handle, unsigned *replays)
{
    DEVICE(handle);
    *replays = gpu->pcie_replays;
    return leave(SUCCESS);
}

int nvmlDeviceGetPerformanceState(void *handle, unsigned *performance_state)
{
    DEVICE(handle);
    *performance_state = gpu->performance_state;
    return leave(SUCCESS);
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *is_active)
{
    DEVICE(handle);
    if (!gpu->nvlinks)
        return leave(NOT_SUPPORTED);
    if (link >= gpu->nvlinks)
        return leave(INVALID_ARGUMENT);
    *is_active = link < gpu->nvlinks_up;
    return leave(SUCCESS);
}

/* Of the fields, the temperature of the memory, which is a little above that of the GPU here, the recovery action, and
 * the errors of NVLinks, all of which are replays. */
int nvmlDeviceGetFieldValues(void *handle, int count, struct field *fields)
{
    DEVICE(handle);
    for (int i = 0; i < count; i++) {
        int is_recovery = fields[i].id == 230 && gpu->recovery_action != ~0u;
        int is_link = fields[i].id >= 161 && fields[i].id <= 163 && gpu->nvlinks;
        fields[i].result = fields[i].id == 82 || is_recovery || is_link ? SUCCESS : NOT_SUPPORTED;
        fields[i].type = 1; /* unsigned int */
        if (is_link) {
            fields[i].value.integer = fields[i].id == 161 ? gpu->nvlink_errors : 0;
            continue;
        }
        fields[i].value.integer = is_recovery ? gpu->recovery_action : (unsigned)lround(gpu->temperature + 6);
    }
    return leave(SUCCESS);
}

/* --- events: XIDs -------------------------------------------------------------------------------------- */

int nvmlEventSetCreate(struct event_set **set)
{
    int result = begin(__func__, -1);
    if (result == SUCCESS)
        *set = calloc(1, sizeof **set);
    return leave(result);
}

int nvmlEventSetFree(struct event_set *set)
{
    free(set);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, struct event_set *set)
{
    DEVICE(handle);
    if (!(types & 0x8))
        return leave(NOT_SUPPORTED);
    int place = (int)(gpu - state->gpus);
    set->gpus |= 1u << place;
    set->seen[place] = gpu->xid_count;
    return leave(SUCCESS);
}

static int next_event(struct event_set *set, struct event *event)
{
    int result = begin("nvmlEventSetWait_v2", -1);
    if (result != SUCCESS)
        return leave(result);
    for (int i = 0; i < (int)state->count; i++) {
        struct gpu *gpu = &state->gpus[i];
        if (!(set->gpus & 1u << i) || set->seen[i] == gpu->xid_count)
            continue;
        *event = (struct event){handle_of(i), 0x8, gpu->xids[set->seen[i]++ % MOST_XIDS], ~0u, ~0u};
        return leave(SUCCESS);
    }
    return leave(TIMEOUT);
}

int nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned timeout_ms)
{
    for (unsigned waited = 0;; waited += 5) {
        int result = next_event(set, event);
        if (result != TIMEOUT || waited >= timeout_ms)
            return result;
        usleep(5000);
    }
}
