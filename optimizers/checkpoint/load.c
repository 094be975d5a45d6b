/* Loads objects, which is collective, and an optimizer. It also has the optimizer's call that saves
 * to files, the counterpart of one here. */
#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "onebit/checkpoint.h"
#include "optimizers/checkpoint/checkpoint.h"

/* --- Of all objects ----------------------------------------------------------------------------*/

/* Checks all that can be checked without a change. */
static onebit_status_t checkpoint_load_look(const struct ob_load *load, onebit_status_t status,
                                            struct ob_parts *parts,
                                            const struct ob_sources *sources) {
  OB_TRY(status);
  OB_TRY(ob_parts_open(parts, sources));
  OB_TRY(ob_parts_together(parts));
  return load->restore(load->object, parts, true);
}

onebit_status_t ob_load_parts(const struct ob_load *load, onebit_status_t status,
                              const struct ob_sources *sources) {
  struct ob_parts parts = {0};
  status = checkpoint_load_look(load, status, &parts, sources);
  const struct ob_term terms[] = {
      {"count", (uint64_t)parts.count},
      {"the checkpoint (its fingerprint)", status == ONEBIT_OK ? ob_parts_identity(&parts) : 0},
      load->term,
  };
  status = ob_agree(load->comm, status, terms, 2 + (load->term.name != NULL));
  if (load->agreed)
    status = load->agreed(load->object, status);
  if (status == ONEBIT_OK) {
    status = load->restore(load->object, &parts, false);
    if (status == ONEBIT_ERROR_FILE)
      status = ob_error(status, "%s; part of the state has been loaded", onebit_last_error());
    status = ob_agree(load->comm, status, NULL, 0);
  }
  load->close(load->object);
  ob_parts_close(&parts);
  return status;
}

/* --- Of an optimizer ---------------------------------------------------------------------------*/

static onebit_status_t checkpoint_load_allocate(struct ob_loading *loading) {
  const struct onebit_optimizer *optimizer = loading->optimizer;
  size_t scales = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++) {
    const struct onebit_plan *plan = optimizer->buckets[u].bits;
    size_t wanted = ob_plan_geometry(plan)->one_scale ? ob_plan_geometry(plan)->segments
                                                      : ob_plan_layout(plan)->blocks;
    scales = wanted > scales ? wanted : scales;
  }
  loading->values = ob_allocate(2 * OB_CHUNK, sizeof(float));
  loading->scales = ob_allocate(scales, sizeof(float));
  if (!loading->values || !loading->scales)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to load an optimizer");
  loading->more = loading->values + OB_CHUNK;
  return ob_reader_create(&loading->reader, optimizer);
}

static onebit_status_t checkpoint_load_prepare(struct ob_loading *loading, struct ob_parts *parts) {
  const struct ob_state state = ob_optimizer_state(loading->optimizer);
  loading->parts = parts;
  OB_TRY(ob_map_create(&loading->map, &state));
  return checkpoint_load_allocate(loading);
}

static onebit_status_t checkpoint_load_restore(void *object, struct ob_parts *parts, bool dry) {
  struct ob_loading *loading = object;
  if (dry) {
    OB_TRY(checkpoint_load_prepare(loading, parts));
    OB_TRY(ob_parts_check(parts, loading->optimizer, &loading->map));
  }
  loading->dry = dry;
  return ob_restore(loading);
}

static void close_loading(void *object) {
  struct ob_loading *loading = object;
  ob_map_destroy(&loading->map);
  ob_reader_destroy(&loading->reader);
  ob_release(loading->values);
  ob_release(loading->scales);
  *loading = (struct ob_loading){.optimizer = loading->optimizer};
}

static onebit_status_t restore_part(struct ob_loading *loading, struct ob_parts *parts) {
  const struct ob_part_header *header = &parts->list[0].header;
  parts->sums = ob_allocate(OB_CHUNK, sizeof *parts->sums);
  parts->counts = ob_allocate(OB_CHUNK, sizeof *parts->counts);
  if (!parts->sums || !parts->counts)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory to restore an optimizer");
  OB_TRY(checkpoint_load_prepare(loading, parts));
  parts->same_padding = header->ranks == (uint32_t)loading->optimizer->comm->size &&
                        header->padding == loading->map.total[OB_PADDING];
  return ob_restore(loading);
}

onebit_status_t ob_checkpoint_restore(onebit_optimizer_t optimizer, struct ob_part *part) {
  struct ob_loading loading = {.optimizer = optimizer};
  struct ob_parts parts = {.list = part, .count = 1};
  onebit_status_t status = restore_part(&loading, &parts);
  ob_release(parts.sums);
  ob_release(parts.counts);
  close_loading(&loading);
  return status;
}

static onebit_status_t check_ready(onebit_optimizer_t optimizer) {
  OB_TRY(ob_checkpoint_idle(optimizer));
  if (optimizer->deferred && !optimizer->executor->restored)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "optimizer is on a device that counts its steps: they cannot be set");
  return ONEBIT_OK;
}

static onebit_status_t checkpoint_load(onebit_optimizer_t optimizer,
                                       const struct ob_sources *sources, const char *directory) {
  struct ob_loading loading = {.optimizer = optimizer};
  OB_TRY(ob_handle_check(optimizer, OB_HANDLE_OPTIMIZER, "optimizer"));
  const struct ob_load load = {.object = &loading,
                               .comm = optimizer->comm,
                               .restore = checkpoint_load_restore,
                               .close = close_loading};
  const onebit_status_t status = check_ready(optimizer);
  return sources ? ob_load_parts(&load, status, sources) : ob_load_files(&load, status, directory);
}

onebit_status_t onebit_optimizer_load(onebit_optimizer_t optimizer, const void *const *parts,
                                      const size_t *bytes, int count) {
  OB_CALL_SCOPE;
  const struct ob_sources sources = {.memory = parts, .bytes = bytes, .count = count};
  return checkpoint_load(optimizer, &sources, NULL);
}

onebit_status_t onebit_optimizer_load_files(onebit_optimizer_t optimizer, const char *directory) {
  OB_CALL_SCOPE;
  return checkpoint_load(optimizer, NULL, directory);
}

onebit_status_t onebit_optimizer_save_files(onebit_optimizer_t optimizer, const char *directory) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  const onebit_status_t status = ob_checkpoint_idle(optimizer);
  const struct ob_state state = ob_optimizer_state(optimizer);
  return ob_state_save_files(&state, status, directory);
}
