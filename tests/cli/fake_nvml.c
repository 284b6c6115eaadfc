/* fake_nvml.c: NVML's functions for one GPU that does not exist, at bus 0000:01:00.0: what it says repeats after six. */
#include <string.h>

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device);
int nvmlDeviceGetClockInfo(void *device, int which, unsigned *mhz);
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons);

enum { NOT_FOUND = 6, UNKNOWN = 999 };

static const struct {
    unsigned mhz;
    unsigned long long reasons;
} said[] = {{1980, 0}, {345, 0x1}, {1700, 0x4}, {1600, 0x4 | 0x20}, {1500, 0x8 | 0x40}, {1900, 0}};
static unsigned samples;
static int users;

int nvmlInit_v2(void)
{
    users++;
    samples = 0;
    return 0;
}

int nvmlShutdown(void)
{
    users--;
    return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device)
{
    if (users != 1 || strcmp(bus, "0000:01:00.0") != 0) return NOT_FOUND;
    *device = &samples;
    return 0;
}

int nvmlDeviceGetClockInfo(void *device, int which, unsigned *mhz)
{
    if (users != 1 || device != &samples || which != 1) return UNKNOWN;
    *mhz = said[samples % 6].mhz;
    return 0;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons)
{
    if (users != 1 || device != &samples) return UNKNOWN;
    *reasons = said[samples++ % 6].reasons;
    return 0;
}
