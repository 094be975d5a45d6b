/* Loading, which is collective: the checks, and then what restore.c does. */
#include "base/call_scope.h"
#include "base/error.h"
#include "base/handles.h"
#include "base/memory.h"
#include "collectives/agree.h"
#include "onebit/checkpoint.h"
#include "optimizers/checkpoint/checkpoint.h"

static onebit_status_t allocate(struct ob_loading *loading) {
  const struct onebit_optimizer *optimizer = loading->optimizer;
  size_t scales = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    const struct onebit_plan *plan = optimizer->buckets[u].bits;
    size_t wanted = plan->work.one_scale ? plan->geometry.segments : plan->geometry.layout.blocks;
    scales = wanted > scales ? wanted : scales;
  }
  loading->values = ob_allocate(2 * OB_CHUNK, sizeof(float));
  loading->scales = ob_allocate(scales, sizeof(float));
  if (!loading->values || !loading->scales)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to load an optimizer");
  loading->more = loading->values + OB_CHUNK;
  return ob_reader_create(&loading->reader, optimizer);
}

/* All that can be looked at without changing anything. */
static onebit_status_t look(struct ob_loading *loading, onebit_status_t status,
                            const struct ob_sources *sources) {
  onebit_optimizer_t optimizer = loading->optimizer;
  OB_TRY(status);
  OB_TRY(ob_checkpoint_idle(optimizer));
  if (optimizer->deferred && !optimizer->executor->restored)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "optimizer is on a device that counts its steps: it cannot be told of others");
  const struct ob_state state = ob_optimizer_state(optimizer);
  OB_TRY(ob_map_create(&loading->map, &state));
  OB_TRY(ob_parts_open(&loading->parts, sources));
  OB_TRY(ob_parts_check(&loading->parts, optimizer, &loading->map));
  OB_TRY(allocate(loading));
  loading->dry = true;
  return ob_restore(loading);
}

static onebit_status_t load(struct ob_loading *loading, onebit_status_t status) {
  onebit_comm_t comm = loading->optimizer->comm;
  const struct ob_term terms[] = {
      {"count", (uint64_t)loading->parts.count},
      {"the checkpoint (its fingerprint)",
       status == ONEBIT_OK ? ob_parts_identity(&loading->parts) : 0},
  };
  OB_TRY(ob_agree(comm, status, terms, sizeof terms / sizeof terms[0]));
  loading->dry = false;
  status = ob_restore(loading);
  if (status == ONEBIT_ERROR_FILE)
    status = ob_error(status, "%s; a part of the state has been taken", onebit_last_error());
  return ob_agree(comm, status, NULL, 0);
}

static void close_loading(struct ob_loading *loading) {
  ob_map_destroy(&loading->map);
  ob_reader_destroy(&loading->reader);
  ob_release(loading->values);
  ob_release(loading->scales);
}

onebit_status_t ob_checkpoint_load(onebit_optimizer_t optimizer, onebit_status_t status,
                                   const struct ob_sources *sources) {
  struct ob_loading loading = {.optimizer = optimizer};
  status = load(&loading, look(&loading, status, sources));
  ob_parts_close(&loading.parts);
  close_loading(&loading);
  return status;
}

static onebit_status_t restore(struct ob_loading *loading, struct ob_part *part) {
  onebit_optimizer_t optimizer = loading->optimizer;
  struct ob_parts *parts = &loading->parts;
  const struct ob_state state = ob_optimizer_state(optimizer);
  OB_TRY(ob_map_create(&loading->map, &state));
  *parts = (struct ob_parts){.list = part, .count = 1};
  parts->sums = ob_allocate(OB_CHUNK, sizeof *parts->sums);
  parts->counts = ob_allocate(OB_CHUNK, sizeof *parts->counts);
  if (!parts->sums || !parts->counts)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to restore an optimizer");
  parts->same_padding = part->header.ranks == (uint32_t)optimizer->comm->size &&
                        part->header.padding == loading->map.total[OB_PADDING];
  OB_TRY(allocate(loading));
  return ob_restore(loading);
}

onebit_status_t ob_checkpoint_restore(onebit_optimizer_t optimizer, struct ob_part *part) {
  struct ob_loading loading = {.optimizer = optimizer};
  onebit_status_t status = restore(&loading, part);
  ob_release(loading.parts.sums);
  ob_release(loading.parts.counts);
  close_loading(&loading);
  return status;
}

onebit_status_t onebit_optimizer_load(onebit_optimizer_t optimizer, const void *const *parts,
                                      const size_t *bytes, int count) {
  OB_CALL_SCOPE;
  OB_TRY(ob_handle_check(optimizer, OB_HANDLE_OPTIMIZER, "optimizer"));
  const struct ob_sources sources = {.memory = parts, .bytes = bytes, .count = count};
  return ob_checkpoint_load(optimizer, ONEBIT_OK, &sources);
}
