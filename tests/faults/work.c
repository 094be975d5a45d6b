/* The work of a rank: collectives or a training, whose results are the same to the bit in every
 * run. The rank follows the documentation's advice: it continues after some errors and ends after
 * others. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "tests/faults/faults.h"

#ifdef ONEBIT_HAVE_NCCL
#include "onebit/cuda.h"
#endif

/* With MANY elements each segment has several chunks. With FEW a dense allreduce uses recursive
 * doubling. */
enum { MANY = 20000, FEW = 500, CHUNK = 2048 };

struct job {
  struct participant *participant;
  size_t count;
  float *input, *output;
  float *device_input, *device_output; /* device buffers; NULL if the host's buffers are used */
  onebit_plan_t plan, other, gather;
  onebit_optimizer_t optimizer;
  int call;
  uint64_t hash;
};

static enum work work_of(const struct job *job) { return job->participant->shared->row.work; }

static bool is_mine(const struct job *job, enum fault fault) {
  const struct row *row = &job->participant->shared->row;
  return row->fault == fault && job->participant->rank == row_victim(row) &&
         job->call == (row->moment == FIRST_CALL ? 0 : MIDDLE);
}

/* Returns a value between -1 and 1. Magnitudes and signs differ by rank, call and element. */
static float value_of(int rank, int call, size_t i) {
  uint64_t x = ((uint64_t)rank << 40) ^ ((uint64_t)call << 48) ^ (i + 1) * 0x9e3779b97f4a7c15u;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 32;
  float value = (float)(int32_t)(uint32_t)x / 0x1p31f;
  return value * value * value;
}

static void fill_input(struct job *job) {
  for (size_t i = 0; i < job->count; i++)
    job->input[i] = value_of(job->participant->rank, job->call, i);
  if (is_mine(job, INFINITE) && !job->participant->committed)
    job->input[job->count / 2] = INFINITY;
}

static void add_result(struct job *job, const float *result, size_t count) {
  job->hash = ob_hash(job->hash, result, count * sizeof *result);
}

/* --- Collectives */

static onebit_plan_options_t options_of(const struct job *job) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  enum work work = work_of(job);
  options.chunk_size = CHUNK;
  options.schedule = work == ALLGATHER      ? ONEBIT_SCHEDULE_ALLGATHER
                     : work == HIERARCHICAL ? ONEBIT_SCHEDULE_HIERARCHICAL
                     : work == EXCHANGE     ? ONEBIT_SCHEDULE_EXCHANGE
                                            : ONEBIT_SCHEDULE_AUTOMATIC;
  if (work == DENSE || work == DOUBLING)
    options.wire = ONEBIT_WIRE_DENSE;
  if (work == SCATTER)
    options.operation = ONEBIT_REDUCE_SCATTER;
  if (job->device_input)
    options.device = ONEBIT_DEVICE_CUDA;
  return options;
}

/* The element count of a plan. A reduce-scatter counts elements per rank. */
static size_t plan_count(const struct job *job) {
  return work_of(job) == SCATTER ? job->count / RANKS : job->count;
}

static onebit_status_t make_plans(struct job *job) {
  onebit_plan_options_t options = options_of(job);
  onebit_comm_t comm = job->participant->comm;
  onebit_status_t status = onebit_plan_create(comm, plan_count(job), &options, &job->plan);
  if (status == ONEBIT_OK)
    status = onebit_plan_create(comm, plan_count(job), &options, &job->other);
  options.operation = ONEBIT_ALLGATHER;
  if (status == ONEBIT_OK && work_of(job) == SCATTER)
    status = onebit_plan_create(comm, plan_count(job), &options, &job->gather);
  return status;
}

/* Makes the collective call. For the moment BEGUN, starts the call, commits the fault, and waits
 * for the call. */
static onebit_status_t call_plan(struct job *job, bool *left) {
  const float *input = is_mine(job, REFUSED) && !job->participant->committed ? NULL : job->input;
  bool begun = job->call == MIDDLE && job->participant->shared->row.moment == BEGUN;
  onebit_plan_t plan = is_mine(job, OTHER_PLAN) ? job->other : job->plan;
  onebit_request_t request;
  if (is_mine(job, REFUSED) || is_mine(job, INFINITE))
    job->participant->committed = true;
  if (work_of(job) == SCATTER)
    return onebit_reduce_scatter(input, job->output, plan);
  if (!begun)
    return onebit_allreduce(input, job->output, plan);
  onebit_status_t status = onebit_iallreduce(input, job->output, plan, &request);
  *left = !commit_fault(job->participant, BEGUN);
  return status == ONEBIT_OK ? onebit_wait(&request) : status;
}

#ifdef ONEBIT_HAVE_NCCL
static onebit_status_t call_device(struct job *job, bool *left) {
  size_t bytes = job->count * sizeof(float);
  bool begun = job->call == MIDDLE && job->participant->shared->row.moment == BEGUN;
  if (is_mine(job, INFINITE))
    job->participant->committed = true;
  cudaMemcpy(job->device_input, job->input, bytes, cudaMemcpyDefault);
  onebit_status_t status =
      onebit_allreduce_stream(job->device_input, job->device_output, job->plan, NULL);
  if (begun)
    *left = !commit_fault(job->participant, BEGUN);
  onebit_status_t ended = onebit_plan_synchronize(job->plan);
  if (status == ONEBIT_OK && ended == ONEBIT_OK)
    cudaMemcpy(job->output, job->device_output, bytes, cudaMemcpyDefault);
  return status == ONEBIT_OK ? ended : status;
}
#else
static onebit_status_t call_device(struct job *job, bool *left) { return call_plan(job, left); }
#endif

static onebit_status_t gather_result(struct job *job) {
  size_t count = plan_count(job);
  float *own = job->output + (size_t)job->participant->rank * count;
  memmove(own, job->output, count * sizeof *own);
  return onebit_allgather(own, job->output, job->gather);
}

static onebit_status_t call_collective(struct job *job, bool *left) {
  fill_input(job);
  onebit_status_t status = job->device_input ? call_device(job, left) : call_plan(job, left);
  if (status == ONEBIT_OK && job->gather)
    status = gather_result(job);
  if (status == ONEBIT_OK)
    add_result(job, job->output, job->count);
  return status;
}

/* --- Trainings: `output` has the parameters, `input` has the gradients */

static onebit_status_t make_optimizer(struct job *job) {
  size_t half = job->count / 2;
  const onebit_tensor_t tensors[] = {
      {.parameter = job->output, .gradient = job->input, .count = half},
      {.parameter = job->output + half, .gradient = job->input + half, .count = half}};
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  onebit_zero_one_adam_options_t zero_one = ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT;
  for (size_t i = 0; i < job->count; i++)
    job->output[i] = value_of(RANKS, 0, i);
  adam.freeze_step = 3;
  adam.common.chunk_size = CHUNK;
  zero_one.variance_freeze_step = 3;
  if (work_of(job) == LOCAL_STEPS)
    return onebit_zero_one_adam_create(job->participant->comm, tensors, 2, &zero_one,
                                       &job->optimizer);
  return onebit_adam_create(job->participant->comm, tensors, 2, &adam, &job->optimizer);
}

/* Saves the training. A full disk loses only the checkpoint. */
static onebit_status_t save_training(struct job *job) {
  onebit_status_t status =
      onebit_optimizer_save_files(job->optimizer, job->participant->shared->directory);
  bool full = job->participant->shared->row.fault == FULL_DISK;
  return full && (status == ONEBIT_ERROR_FILE || status == ONEBIT_ERROR_PEER) ? ONEBIT_OK : status;
}

static onebit_status_t run_training(struct job *job) {
  float rate = is_mine(job, REFUSED) && !job->participant->committed ? NAN : 0.01f;
  fill_input(job);
  if (is_mine(job, REFUSED) || is_mine(job, INFINITE))
    job->participant->committed = true;
  onebit_status_t status = onebit_optimizer_step(job->optimizer, rate);
  if (status == ONEBIT_OK && work_of(job) == SAVING && job->call % 3 == 2)
    status = save_training(job);
  if (status == ONEBIT_OK && job->call == CALLS - 1)
    add_result(job, job->output, job->count);
  return status;
}

/* --- A job */

static bool is_training(const struct job *job) { return work_of(job) >= TRAINING; }

/* True if the call must be repeated: its failure was reported to all ranks and changed no state. */
static bool is_to_repeat(const struct job *job, onebit_status_t status) {
  enum fault fault = job->participant->shared->row.fault;
  return (fault == REFUSED && (status == ONEBIT_ERROR_ARGUMENT || status == ONEBIT_ERROR_PEER)) ||
         (fault == INFINITE && status == ONEBIT_SKIPPED);
}

static enum moment moment_of(int call) {
  return call == 0 ? FIRST_CALL : call == MIDDLE ? MIDDLE_CALL : MOMENTS;
}

static onebit_status_t run_calls(struct job *job, bool *left) {
  struct record *record = &job->participant->shared->records[job->participant->rank];
  for (job->call = 0; job->call < CALLS && !*left; job->call++) {
    if (!commit_fault(job->participant, moment_of(job->call)))
      *left = true;
    for (int again = 0; !*left && again < 2; again++) {
      onebit_status_t status = is_training(job) ? run_training(job) : call_collective(job, left);
      if (again == 0 && is_to_repeat(job, status))
        continue;
      if (status != ONEBIT_OK)
        return status;
      break;
    }
    record->calls++;
  }
  return ONEBIT_OK;
}

static bool allocate_buffers(struct job *job) {
  job->count = work_of(job) == DOUBLING ? FEW : MANY;
  job->hash = OB_HASH_START;
  job->input = calloc(job->count, sizeof(float));
  job->output = calloc(job->count, sizeof(float));
#ifdef ONEBIT_HAVE_NCCL
  if (job->participant->shared->row.transport == NCCL)
    return cudaMalloc((void **)&job->device_input, job->count * sizeof(float)) == cudaSuccess &&
           cudaMalloc((void **)&job->device_output, job->count * sizeof(float)) == cudaSuccess;
#endif
  return job->input && job->output;
}

static void free_buffers(struct job *job) {
  onebit_optimizer_destroy(job->optimizer);
  onebit_plan_destroy(job->plan);
  onebit_plan_destroy(job->other);
  onebit_plan_destroy(job->gather);
  onebit_comm_destroy(job->participant->comm);
#ifdef ONEBIT_HAVE_NCCL
  cudaFree(job->device_input);
  cudaFree(job->device_output);
#endif
  free(job->input);
  free(job->output);
}

static onebit_status_t run_job(struct job *job, connect_function *connect, bool *left) {
  if (!allocate_buffers(job))
    return ONEBIT_ERROR_MEMORY;
  if ((*left = !commit_fault(job->participant, BEFORE_COMM)))
    return ONEBIT_OK;
  onebit_status_t status = connect(job->participant, &job->participant->comm);
  if (status != ONEBIT_OK || (*left = !commit_fault(job->participant, BEFORE_PLAN)))
    return status;
  status = is_training(job) ? make_optimizer(job) : make_plans(job);
  if (status == ONEBIT_OK)
    status = run_calls(job, left);
  if (status == ONEBIT_OK && !*left)
    *left = !commit_fault(job->participant, LAST);
  return status;
}

void participant_run(struct participant *participant, connect_function *connect) {
  struct record *record = &participant->shared->records[participant->rank];
  struct job job = {.participant = participant};
  bool left = false;
  atomic_store(&record->state, RUNNING);
  record->status = run_job(&job, connect, &left);
  record->ended = participant_clock();
  record->hash = job.hash;
  snprintf(record->message, sizeof record->message, "%s", onebit_last_error());
  if (left)
    record->status = ONEBIT_SKIPPED; /* the other ranks need not notice that this rank left */
  free_buffers(&job);
  atomic_store(&record->state, ENDED);
}
