/* The counters and the memory that the ranks of a host share. */
#include "collectives/schedules/host.h"

#include <stdatomic.h>
#include <stdio.h>

#include "base/error.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "collectives/messages.h"
#include "collectives/plan_private.h"
#include "collectives/steps.h"

/* The number of chunks of inputs in the window: one that is summed, one that is loaded, and one
 * more for a rank that is ahead. The number is small, so that the chunks stay in the caches. */
#define WINDOW_CHUNKS 3

/* Progress counters of a rank, in chunks, each in a cache line of its own: the numbers of chunks
 * that the rank has loaded into its window, read from all windows, collected from the other hosts,
 * and applied. */
enum counter { LOADED, USED, COLLECTED, APPLIED, COUNTERS };

/* The beginning of a rank's block. Flags and the agreed number have one entry for calls with an
 * even number and one for calls with an odd number. Two entries are enough, since no rank is more
 * than one call ahead of another. */
struct page {
  struct {
    _Alignas(OB_ALIGNMENT) _Atomic uint64_t chunks;
  } counters[COUNTERS];
  _Alignas(OB_ALIGNMENT) _Atomic uint32_t flags[2];
  _Atomic uint32_t agreed[2];
  _Atomic float rms[2];  /* struct ob_ladder */
  _Atomic uint32_t gone; /* 1: the rank's transport has failed, with the error message `end` */
  char end[OB_END_BYTES];
};

static struct page *rank_page(const struct ob_host *host, size_t rank) {
  return (struct page *)(void *)host->shared.base[rank];
}

static size_t round_up_to_line(size_t bytes) {
  return (bytes + OB_ALIGNMENT - 1) / OB_ALIGNMENT * OB_ALIGNMENT;
}

/* --- Memory ------------------------------------------------------------------------------------*/

static onebit_status_t create_shared_memory(struct onebit_plan *plan) {
  struct ob_host *host = &plan->host;
  const struct ob_hosts *hosts = &plan->comm->hosts;
  size_t elements = ob_plan_longest_message(plan),
         results = plan->geometry.members * plan->geometry.peer_stride;
  host->slots = plan->geometry.chunks < WINDOW_CHUNKS ? plan->geometry.chunks : WINDOW_CHUNKS;
  host->segment_bytes = round_up_to_line(elements * sizeof(float));
  host->inputs_at = round_up_to_line(sizeof(struct page));
  host->results_at[0] =
      host->inputs_at + host->slots * plan->geometry.segments * host->segment_bytes;
  host->results_at[1] = host->results_at[0] + (plan->momentum ? round_up_to_line(results) : 0);
  size_t bytes = host->results_at[1] + round_up_to_line(results);
  host->mean = ob_allocate(elements, sizeof(float));
  host->views = ob_allocate(host->ranks, sizeof *host->views);
  if (!host->mean || !host->views)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the sums of %zu ranks", host->ranks);
  OB_TRY(ob_shared_create(&host->shared, bytes, hosts->each, hosts->local_rank));
  plan->memory_bytes += bytes + elements * sizeof(float);
  for (int copy = 0; copy < 2; copy++)
    plan->geometry.results[copy] = host->shared.base[host->local_rank] + host->results_at[copy];
  return ONEBIT_OK;
}

onebit_status_t ob_host_create(struct onebit_plan *plan) {
  const struct ob_hosts *hosts = &plan->comm->hosts;
  plan->host =
      (struct ob_host){.ranks = (size_t)hosts->each, .local_rank = (size_t)hosts->local_rank};
  return plan->executor->shares_memory ? create_shared_memory(plan) : ONEBIT_OK;
}

onebit_status_t ob_host_attach(struct onebit_plan *plan) {
  const struct ob_hosts *hosts = &plan->comm->hosts;
  for (int k = 0; k < hosts->each; k++) {
    uint64_t name = ob_agree_note(plan->comm, hosts->ranks[hosts->host * hosts->each + k]);
    OB_TRY(ob_shared_attach(&plan->host.shared, k, name));
  }
  return ONEBIT_OK;
}

void ob_host_destroy(struct ob_host *host) {
  ob_shared_destroy(&host->shared);
  ob_release(host->mean);
  ob_release(host->views);
}

/* --- Counters ----------------------------------------------------------------------------------*/

static void set_counter(const struct ob_host *host, enum counter kind, uint64_t chunks) {
  atomic_store_explicit(&rank_page(host, host->local_rank)->counters[kind].chunks, chunks,
                        memory_order_release);
}

static uint64_t read_counter(const struct ob_host *host, size_t rank, enum counter kind) {
  return atomic_load_explicit(&rank_page(host, rank)->counters[kind].chunks, memory_order_acquire);
}

static bool is_gone(const struct ob_host *host, size_t rank) {
  return atomic_load_explicit(&rank_page(host, rank)->gone, memory_order_acquire);
}

/* Returns the list of the ranks on this host. */
static const int *host_ranks(const struct onebit_plan *plan) {
  const struct ob_hosts *hosts = &plan->comm->hosts;
  return hosts->ranks + hosts->host * hosts->each;
}

/* True if the counters of all ranks of the host have reached `chunks`, or if a rank has failed.
 * Otherwise the transport advances this rank's messages, because the other ranks may wait for
 * them. */
static bool have_all_ranks_done(const struct onebit_plan *plan, enum counter kind,
                                uint64_t chunks) {
  const struct ob_host *host = &plan->host;
  plan->flight->host.awaited = -1;
  for (size_t rank = 0; rank < host->ranks; rank++) {
    if (read_counter(host, rank, kind) >= chunks)
      continue;
    plan->flight->host.awaited = host_ranks(plan)[rank];
    if (is_gone(host, rank)) {
      ob_error(ONEBIT_ERROR_TRANSPORT, "%.*s", OB_END_BYTES - 1, rank_page(host, rank)->end);
      ob_steps_give_up(plan);
      return true;
    }
    if (plan->comm->transport->progress)
      plan->comm->transport->progress(plan->comm);
    return false;
  }
  return true;
}

/* --- Flags -------------------------------------------------------------------------------------*/

static void publish_flags(const struct onebit_plan *plan) {
  struct page *page = rank_page(&plan->host, plan->host.local_rank);
  atomic_store_explicit(&page->flags[plan->flight->host.parity], ob_steps_flags(plan),
                        memory_order_relaxed);
  atomic_store_explicit(&page->rms[plan->flight->host.parity], plan->state->ladder.max_rms,
                        memory_order_relaxed);
}

/* Records the flags that the other ranks of the host have published. */
static void record_host_flags(const struct onebit_plan *plan) {
  const struct ob_host *host = &plan->host;
  const unsigned parity = plan->flight->host.parity;
  const int *ranks = host_ranks(plan);
  for (size_t k = 0; k < host->ranks; k++) {
    struct page *page = rank_page(host, k);
    unsigned flags = atomic_load_explicit(&page->flags[parity], memory_order_relaxed);
    uint32_t agreed = atomic_load_explicit(&page->agreed[parity], memory_order_relaxed);
    float rms = atomic_load_explicit(&page->rms[parity], memory_order_relaxed);
    if (k == host->local_rank)
      continue;
    ob_ladder_add_flags(&plan->state->ladder, flags, rms);
    ob_steps_add_flags(plan, ranks[k], flags, agreed);
  }
}

/* --- A call ------------------------------------------------------------------------------------*/

void ob_host_begin(const struct onebit_plan *plan) {
  struct page *page = rank_page(&plan->host, plan->host.local_rank);
  const unsigned parity = plan->state->calls & 1;
  plan->flight->host = (struct ob_host_call){
      .base = plan->state->calls * plan->geometry.chunks, .parity = parity, .awaited = -1};
  ob_host_end(plan); /* needed if the previous call was never applied (ob_plan_apply) */
  atomic_store_explicit(&page->flags[parity], 0, memory_order_relaxed);
  atomic_store_explicit(&page->agreed[parity], plan->flight->call.agreed, memory_order_relaxed);
  plan->state->calls++;
}

/* Sets this rank's counters to their values after the call, so that no rank waits for steps that a
 * skipped call has left out. A rank whose transport has failed leaves its counters as they are, so
 * that the other ranks do not believe that it has done its missing steps. */
void ob_host_end(const struct onebit_plan *plan) {
  for (int kind = 0; kind < COUNTERS && !plan->state->broken; kind++)
    set_counter(&plan->host, (enum counter)kind, plan->state->calls * plan->geometry.chunks);
}

void ob_host_give_up(const struct onebit_plan *plan) {
  struct page *page = rank_page(&plan->host, plan->host.local_rank);
  snprintf(page->end, sizeof page->end, "%s", plan->flight->outcome.error);
  atomic_store_explicit(&page->gone, 1, memory_order_release);
}

bool ob_host_is_half(const struct onebit_plan *plan) {
  return plan->state->work.dtype != ONEBIT_FLOAT32 && !plan->flight->call.source.float32;
}

void *ob_host_window(const struct onebit_plan *plan, size_t rank, size_t segment, size_t chunk) {
  const struct ob_host *host = &plan->host;
  size_t slot = (plan->flight->host.base + chunk) % host->slots;
  return host->shared.base[rank] + host->inputs_at +
         (slot * plan->geometry.segments + segment) * host->segment_bytes;
}

/* True if no rank still needs the chunk that used this slot before. */
bool ob_host_is_free(const struct onebit_plan *plan, size_t chunk) {
  uint64_t number = plan->flight->host.base + chunk + 1, slots = plan->host.slots;
  return number <= slots || have_all_ranks_done(plan, USED, number - slots);
}

void ob_host_mark_loaded(const struct onebit_plan *plan, size_t chunk) {
  publish_flags(plan);
  set_counter(&plan->host, LOADED, plan->flight->host.base + chunk + 1);
}

bool ob_host_put(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  if (!ob_host_is_free(plan, chunk))
    return false;
  for (size_t segment = 0;
       plan->flight->outcome.status == ONEBIT_OK && segment < plan->geometry.segments; segment++) {
    struct ob_message_shape shape = ob_plan_message(plan, segment, chunk);
    struct ob_view out = {.values = ob_host_window(plan, plan->host.local_rank, segment, chunk)};
    shape.half = ob_host_is_half(plan);
    ob_load_blocks(&plan->state->work, &plan->flight->call.source, &shape, &out);
  }
  ob_host_mark_loaded(plan, chunk);
  return true;
}

bool ob_host_barrier(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  if (!have_all_ranks_done(plan, LOADED, plan->flight->host.base + chunk + 1))
    return false;
  record_host_flags(plan);
  return true;
}

void ob_host_mean(const struct onebit_plan *plan, size_t segment, size_t chunk,
                  const struct ob_message_shape *shape, struct ob_view *out) {
  const struct ob_host *host = &plan->host;
  struct ob_message_shape inputs = *shape;
  inputs.half = ob_host_is_half(plan);
  for (size_t k = 0; k < host->ranks; k++) {
    host->views[k].values = ob_host_window(plan, k, segment, chunk);
    host->views[k].halves = (uint16_t *)(void *)host->views[k].values;
  }
  ob_average_values(&plan->state->work, host->views, host->ranks, plan->flight->call.source.factor,
                    &inputs, out);
}

void ob_host_mark_used(const struct onebit_plan *plan, size_t chunk) {
  set_counter(&plan->host, USED, plan->flight->host.base + chunk + 1);
}

bool ob_host_wait_free(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  uint64_t base = plan->flight->host.base;
  return have_all_ranks_done(
      plan, APPLIED, chunk < plan->geometry.slots ? base : base + chunk + 1 - plan->geometry.slots);
}

bool ob_host_publish(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  publish_flags(plan);
  set_counter(&plan->host, COLLECTED, plan->flight->host.base + chunk + 1);
  return true;
}

/* Checks the results that the other ranks of the host have collected in their blocks of memory. */
static void check_collected_results(const struct onebit_plan *plan, size_t chunk) {
  const size_t members = plan->geometry.members;
  const int *ranks = plan->comm->hosts.ranks + plan->comm->hosts.host * plan->comm->hosts.each;
  for (size_t segment = 0; segment < plan->geometry.segments; segment++) {
    size_t k = segment / members;
    if (k == plan->host.local_rank || plan->flight->outcome.status != ONEBIT_OK ||
        plan->flight->failed_rank >= 0)
      continue;
    struct ob_message_shape shape = ob_plan_result_message(plan, segment, chunk);
    struct ob_endpoint one = {ob_plan_result(plan, true, segment, chunk), ob_message_bytes(&shape),
                              ranks[k]};
    ob_check_message(plan, &one, segment, chunk, OB_MESSAGE_SERVER);
  }
}

bool ob_host_wait(const struct onebit_plan *plan, size_t chunk, bool wait) {
  (void)wait;
  if (!have_all_ranks_done(plan, COLLECTED, plan->flight->host.base + chunk + 1))
    return false;
  record_host_flags(plan);
  check_collected_results(plan, chunk);
  return true;
}

static bool apply_host_chunk(const struct onebit_plan *plan, size_t chunk, bool wait) {
  if (!plan->executor->run[OB_STEP_APPLY](plan, chunk, wait))
    return false;
  set_counter(&plan->host, APPLIED, plan->flight->host.base + chunk + 1);
  return true;
}

bool ob_host_apply_early(const struct onebit_plan *plan, size_t chunk, bool wait) {
  return !plan->flight->apply_early_ok || apply_host_chunk(plan, chunk, wait);
}

bool ob_host_apply_late(const struct onebit_plan *plan, size_t chunk, bool wait) {
  return plan->flight->apply_early_ok || apply_host_chunk(plan, chunk, wait);
}
