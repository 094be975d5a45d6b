/* Makes the residuals of replicated servers (collectives/schedules/replicas.c) equal on all ranks,
 * after each rank has loaded the part of the segment that is its own in the exchange. */
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "compression/message.h"
#include "optimizers/optimizer.h"

struct sharing {
  float *all, *parts; /* the residuals of all servers; the parts as they are sent and received */
  size_t longest;     /* the largest number of elements in a part */
};

/* Returns the number of elements before the segment of a rank. */
static size_t elements_before(const struct onebit_plan *plan, size_t rank) {
  const struct ob_geometry *geometry = ob_plan_geometry(plan);
  return ob_layout_elements_before(&geometry->layout, geometry->bounds[rank * geometry->chunks]);
}

static onebit_status_t read_own_part(const struct onebit_plan *plan, struct sharing *sharing) {
  const size_t ranks = ob_plan_geometry(plan)->members, own = ob_plan_geometry(plan)->member;
  for (size_t k = 0; k < ranks; k++) {
    const size_t count = elements_before(plan, k + 1) - elements_before(plan, k);
    sharing->longest = count > sharing->longest ? count : sharing->longest;
  }
  sharing->all = ob_allocate(elements_before(plan, ranks), sizeof *sharing->all);
  sharing->parts = ob_allocate((ranks + 1) * sharing->longest, sizeof *sharing->parts);
  if (!sharing->all || !sharing->parts)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the residuals of %zu servers", ranks);
  OB_TRY(ob_residual_export(ob_plan_residual(plan, true), ob_plan_layout(plan), sharing->all));
  const size_t first = elements_before(plan, own), end = elements_before(plan, own + 1);
  memcpy(sharing->parts, sharing->all + first, (end - first) * sizeof *sharing->all);
  return ONEBIT_OK;
}

static onebit_status_t write_all_parts(onebit_plan_t plan, const struct sharing *sharing) {
  bool large = false;
  for (size_t k = 0; k < ob_plan_geometry(plan)->members; k++) {
    const size_t first = elements_before(plan, k), end = elements_before(plan, k + 1);
    const float *part = sharing->parts + (k + 1) * sharing->longest;
    for (size_t i = first; i < end; i++) {
      sharing->all[i] = part[i - first];
      large |= fabsf(part[i - first]) >= OB_LARGE_SCALE;
    }
  }
  OB_TRY(ob_residual_import(ob_plan_residual(plan, true), ob_plan_layout(plan), sharing->all));
  return ob_plan_note_import(plan, large);
}

static onebit_status_t share_parts(struct onebit_optimizer *optimizer, onebit_plan_t plan) {
  struct sharing sharing = {NULL, NULL, 0};
  onebit_plan_t gather = NULL;
  onebit_status_t status = read_own_part(plan, &sharing);
  status = ob_plan_create_numbers(optimizer->comm, status, ONEBIT_ALLGATHER, ONEBIT_DEVICE_HOST,
                                  sharing.longest, &optimizer->refused, &gather);
  if (status == ONEBIT_OK)
    status = onebit_allgather(sharing.parts, sharing.parts + sharing.longest, gather);
  if (status == ONEBIT_OK)
    status = ob_agree(optimizer->comm, write_all_parts(plan, &sharing), NULL, 0);
  onebit_plan_destroy(gather);
  ob_release(sharing.all);
  ob_release(sharing.parts);
  return status;
}

onebit_status_t ob_buckets_share_servers(struct onebit_optimizer *optimizer,
                                         onebit_status_t status) {
  for (size_t u = 0; u < optimizer->bucket_count && status == ONEBIT_OK; u++) {
    const struct ob_bucket *bucket = &optimizer->buckets[u];
    if (!bucket->uncompressed && ob_plan_geometry(bucket->bits)->replicated)
      status = share_parts(optimizer, bucket->bits);
  }
  return status;
}
