/* Tables of trainings, of optimizers and of outer steps, over each transport. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "collectives/communicator.h"
#include "tests/gpu/plans.h"
#include "tests/gpu/training.h"

#ifdef ONEBIT_HAVE_NCCL
#include "onebit/nccl.h"
#endif

/* --- NCCL */

#ifdef ONEBIT_HAVE_NCCL
bool training_nccl_open(struct training_nccl *group, const struct gpu_rank *self) {
  ncclUniqueId id;
  ncclComm_t nccl;
  memset(&id, 0, sizeof id);
  *group = (struct training_nccl){0};
  if (self->rank == 0)
    CHECK(ncclGetUniqueId(&id) == ncclSuccess, "NCCL has no unique id");
#ifdef ONEBIT_EMULATED_CUDA
  if (self->rank == 0) /* every rank wants a device of its own there */
    setenv("EMULATED_DEVICES", "4", 1);
#endif
  gpu_broadcast(self, &id, sizeof id);
#ifdef ONEBIT_EMULATED_CUDA
  CHECK_CUDA(cudaSetDevice(self->rank));
#endif
  ncclResult_t result = ncclCommInitRank(&nccl, self->size, id, self->rank);
  if (!CHECK(result == ncclSuccess, "NCCL: %s", ncclGetErrorString(result)))
    return false;
  group->nccl = nccl;
  return CHECK_STATUS(onebit_comm_create_nccl(nccl, &group->comm), ONEBIT_OK);
}

void training_nccl_close(struct training_nccl *group) {
  onebit_comm_destroy(group->comm);
  if (group->nccl)
    ncclCommDestroy(group->nccl);
}
#else
bool training_nccl_open(struct training_nccl *group, const struct gpu_rank *self) {
  (void)self;
  *group = (struct training_nccl){0};
  check_skip("this build is without NCCL");
  return false;
}

void training_nccl_close(struct training_nccl *group) { (void)group; }
#endif

/* --- Trainings */

void training_run(const void *cases, size_t k, onebit_comm_t comm, const struct gpu_rank *self,
                  bool device, void *record) {
  const struct training_case *what = (const struct training_case *)cases + k;
  if (device)
    training_compare_case(what, comm, self->rank, self->size, record);
  else
    training_record_case(what, comm, self->rank, self->size, record);
}

bool training_saves(const void *cases, size_t k) {
  return ((const struct training_case *)cases)[k].traits & SAVED_ANEW;
}

void training_check_own(const void *cases, size_t k, int rank, const void *of_own,
                        const void *of_all) {
  const struct training_case *what = (const struct training_case *)cases + k;
  const struct training_record *own = of_own, *record = of_all;
  size_t bytes = TRAINING_ELEMENTS * (training_options(what)->parameter_dtype ? 2 : sizeof(float));
  for (int attempt = 0; attempt < training_attempts(what); attempt++)
    CHECK(!memcmp(own->parameters[rank][attempt], record->parameters[rank][attempt], bytes),
          "attempt %d: a rank on the host has other parameters", attempt);
}

/* --- Runs */

struct run {
  const struct training_table *table;
  char *records;
};

static void run_case(const struct run *run, size_t k, onebit_comm_t comm,
                     const struct gpu_rank *self, bool device) {
  const struct training_table *table = run->table;
  table->run(table->cases, k, comm, self, device, run->records + k * table->record_bytes);
}

static void run_cases(const struct run *run, onebit_comm_t comm, const struct gpu_rank *self,
                      bool device) {
  for (size_t k = 0; k < run->table->count; k++)
    if (sample_has(k, run->table->count))
      run_case(run, k, comm, self, device);
}

static void record_cases(const struct gpu_rank *self, void *context) {
  run_cases(context, self->comm, self, false);
}

/* Ranks of processes find the records in an area. */
static struct run take_run(const struct training_table *table, bool area) {
  size_t bytes = table->count * table->record_bytes;
  return (struct run){table, area ? gpu_area(bytes) : gpu_allocate(bytes, 1)};
}

static void compare_staged(const struct gpu_rank *self, void *context) {
  run_cases(context, self->comm, self, true);
}

void training_over_loopback(const struct training_table *table) {
  struct run run = take_run(table, false);
  for (int size = 1; size <= TRAINING_RANKS; size++)
    if (gpu_threads(size, record_cases, &run))
      gpu_threads(size, compare_staged, &run);
  free(run.records);
}

/* Odd ranks have a device, the others none. */
static void compare_mixed(const struct gpu_rank *self, void *context) {
  const struct run *run = context;
  const struct training_table *table = run->table;
  for (size_t k = 0; k < table->count; k++) {
    if (!sample_has(k, table->count) || table->saves(table->cases, k))
      continue;
    if (self->rank % 2) {
      run_case(run, k, self->comm, self, true);
      continue;
    }
    void *own = gpu_allocate(1, table->record_bytes);
    table->run(table->cases, k, self->comm, self, false, own);
    table->check_own(table->cases, k, self->rank, own, run->records + k * table->record_bytes);
    free(own);
  }
}

void training_in_one_job(const struct training_table *table) {
  struct run run = take_run(table, false);
  for (int size = 2; size <= TRAINING_RANKS; size++)
    if (gpu_threads(size, record_cases, &run))
      gpu_threads(size, compare_mixed, &run);
  free(run.records);
}

static void compare_over_nccl(const struct gpu_rank *self, void *context) {
  struct training_nccl group;
  if (training_nccl_open(&group, self))
    run_cases(context, group.comm, self, true);
  training_nccl_close(&group);
}

void training_over_nccl(const struct training_table *table) {
  struct run run = take_run(table, true);
  for (int size = 1; size <= TRAINING_RANKS; size++)
    if (gpu_threads(size, record_cases, &run))
      gpu_ranks(size, compare_over_nccl, &run);
}

/* The default options' communicator of one rank, which is not loopback's. */
static void compare_alone(const struct gpu_rank *self, void *context) {
  onebit_comm_t comm;
  if (CHECK_STATUS(onebit_comm_create_self(&comm), ONEBIT_OK))
    run_cases(context, comm, self, true);
  onebit_comm_destroy(comm);
}

void training_alone(const struct training_table *table) {
  struct run run = take_run(table, false);
  if (gpu_threads(1, record_cases, &run))
    gpu_threads(1, compare_alone, &run);
  free(run.records);
}

#ifdef ONEBIT_EMULATED_CUDA
static void compare_aware(const struct gpu_rank *self, void *context) {
  const struct ob_transport *before = self->comm->transport;
  ranks_make_aware(self->comm);
  run_cases(context, self->comm, self, true);
  self->comm->transport = before;
}

void training_over_what_knows_devices(const struct training_table *table) {
  struct run run = take_run(table, false);
  for (int size = 1; size <= TRAINING_RANKS; size++)
    if (gpu_threads(size, record_cases, &run))
      gpu_threads(size, compare_aware, &run);
  free(run.records);
}
#else
void training_over_what_knows_devices(const struct training_table *table) {
  (void)table;
  SKIP("a real device is no part of it");
}
#endif
