// NVIDIA's management library for two GPUs of 16 GB, as far as dask-cuda and Dask ask it.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID = 2, UNSUPPORTED = 3, ABSENT = 6, GPUS = 2 };

typedef struct {
  int index;
} Device;

static Device devices[GPUS] = {{0}, {1}};

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char* nvmlErrorString(int status) { return "an error of the fake"; }

int nvmlSystemGetDriverVersion(char* text, unsigned length) {
  snprintf(text, length, "580.00");
  return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = GPUS;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device** device) {
  if (index >= GPUS) return INVALID;
  *device = &devices[index];
  return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char* uuid, Device** device) {
  if (strncmp(uuid, "GPU-", 4)) return ABSENT;
  return nvmlDeviceGetHandleByIndex_v2(atoi(uuid + 4), device) ? ABSENT : SUCCESS;
}

int nvmlDeviceGetIndex(Device* device, unsigned* index) {
  *index = device->index;
  return SUCCESS;
}

int nvmlDeviceGetUUID(Device* device, char* text, unsigned length) {
  snprintf(text, length, "GPU-%08d-0000-0000-0000-000000000000", device->index);
  return SUCCESS;
}

int nvmlDeviceGetName(Device* device, char* text, unsigned length) {
  snprintf(text, length, "Fake");
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device* device, unsigned long long memory[3]) {
  memory[0] = memory[1] = 16ULL << 30;
  memory[2] = 0;
  return SUCCESS;
}

int nvmlDeviceGetCpuAffinity(Device* device, unsigned words, unsigned long* set) {
  memset(set, 0xff, words * sizeof *set);
  return SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(Device* device, unsigned* is) {
  *is = 0;
  return SUCCESS;
}

int nvmlDeviceGetMigMode(Device* device, unsigned* now, unsigned* next) { return UNSUPPORTED; }
int nvmlDeviceGetUtilizationRates(Device* device, unsigned rates[2]) { return UNSUPPORTED; }

int nvmlDeviceGetComputeRunningProcesses_v3(Device* device, unsigned* count, void* processes) {
  *count = 0;
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(Device* device, unsigned* count, void* processes) {
  *count = 0;
  return SUCCESS;
}
