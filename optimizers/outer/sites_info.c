/* The outer step among sites: asked. */
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "optimizers/outer/sites.h"

static void sites_info_cost(const struct ob_fragment *fragment, uint64_t *wire, uint64_t *memory) {
  const struct ob_sites *sites = fragment->outer->sites;
  const struct ob_shard *shard = fragment->state;
  const uint64_t others = (uint64_t)sites->count - 1;
  *memory = 0; /* it is in own_bytes */
  *wire = !sites->between ? 0 : shard->bytes * (ob_shard_is_own(shard) ? others : 1);
}

/* OB_SAVED_WORKER: all that this site has not got into the consensus. While the outer step is
 * detached both are where they are held. */
static size_t sites_info_runs_of(const struct ob_fragment *fragment, enum ob_saved what,
                                 struct ob_outer_run *runs) {
  const struct ob_sites *sites = fragment->outer->sites;
  const struct ob_shard *shard = fragment->state;
  if (!shard || what == OB_SAVED_WORKER) {
    runs[0] = (struct ob_outer_run){0, fragment->count};
    return fragment->count > 0;
  }
  const struct ob_site_part *part = &shard->part[OB_SITE_COMPRESSED];
  size_t count = 0;
  if (!sites->between || !ob_shard_is_own(shard) || !part->pieces)
    return 0;
  for (size_t k = 0; k < part->pieces; k++)
    runs[count++] = (struct ob_outer_run){(size_t)(part->means[k] - sites->mean), part->counts[k]};
  return count;
}

static float *held_of(const struct ob_fragment *fragment, enum ob_saved what) {
  if (!fragment->state)
    return fragment->held[what == OB_SAVED_SERVER];
  return what == OB_SAVED_WORKER ? fragment->drift : NULL;
}

static onebit_status_t sites_info_export_residual(const struct ob_fragment *fragment,
                                                  enum ob_saved what, float *values) {
  const struct ob_shard *shard = fragment->state;
  const float *held = held_of(fragment, what);
  if (!held)
    return ob_residual_export(&shard->part[OB_SITE_COMPRESSED].server,
                              &shard->part[OB_SITE_COMPRESSED].layout, values);
  memmove(values, held, fragment->count * sizeof *values);
  return ONEBIT_OK;
}

static onebit_status_t sites_info_import_residual(struct ob_fragment *fragment, enum ob_saved what,
                                                  const float *values) {
  struct ob_shard *shard = fragment->state;
  float *held = held_of(fragment, what);
  if (!held)
    return ob_residual_import(&shard->part[OB_SITE_COMPRESSED].server,
                              &shard->part[OB_SITE_COMPRESSED].layout, values);
  memmove(held, values, fragment->count * sizeof *values);
  return ONEBIT_OK;
}

/* fragment->drift has it. */
static onebit_status_t sites_info_keep(struct ob_fragment *fragment) {
  (void)fragment;
  return ONEBIT_OK;
}

const struct ob_outer_exchange ob_outer_sites = {.name = "sites",
                                                 .destroy = ob_sites_destroy_shard,
                                                 .cost = sites_info_cost,
                                                 .keep = sites_info_keep,
                                                 .runs = sites_info_runs_of,
                                                 .export_residual = sites_info_export_residual,
                                                 .import_residual = sites_info_import_residual};

onebit_status_t onebit_outer_get_sites(onebit_outer_t outer, onebit_sites_info_t *info) {
  OB_CALL_SCOPE_OF(outer, OB_HANDLE_OUTER);
  OB_TRY(ob_size_check("info", info, sizeof *info));
  const struct ob_sites *sites = outer->sites;
  if (!sites)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "outer was not made by onebit_outer_create_sites");
  uint64_t rounds = 0;
  for (size_t g = 0; sites->groups && g < outer->groups; g++)
    rounds += ob_shard_of(&sites->groups[g], sites->own)->round;
  *info = (onebit_sites_info_t){.size = sizeof *info,
                                .sites = sites->count,
                                .site = sites->own,
                                .quorum = sites->quorum,
                                .patience = sites->patience,
                                .late = sites->late,
                                .rounds = rounds,
                                .left_out = sites->left_out,
                                .caught_up = sites->caught_up};
  return ONEBIT_OK;
}
