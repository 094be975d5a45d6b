/*
 * The part of its drift that a rank has not sent stays in its parameters: after an exchange they
 * are the consensus less its residual, of whichever elements it has one.
 */
#include "tests/support_outer.h"

struct kept {
  onebit_outer_options_t options;
  struct saved_parts parts;
};

static void train_two_rounds(onebit_comm_t comm, void *context) {
  struct kept *kept = context;
  struct outer_trained *it = outer_begin(comm, &kept->options);
  outer_train_to(it, 1, 8);
  outer_save(it, comm, &kept->parts);
  outer_end(it);
}

static size_t check_part(const struct saved_parts *parts, int rank, const float *consensus) {
  float *p = part_values(parts, rank, SECTION_PARAMETERS);
  float *residual = part_values(parts, rank, SECTION_WORKER);
  size_t kept = 0;
  for (size_t i = 0; i < OUTER_ELEMENTS; i++) {
    const float left = isnan(residual[i]) ? 0 : residual[i];
    kept += left != 0;
    if (!CHECK(p[i] == consensus[i] - left, "rank %d, element %zu: %g, not %g - %g", rank, i,
               (double)p[i], (double)consensus[i], (double)left))
      break;
  }
  free(p);
  free(residual);
  return kept;
}

/* Checks the compressed tensors, 521 elements: on each rank, or with two places a host on half of
 * them. */
static void check_kept(onebit_outer_options_t options, int hosts, size_t low, size_t high) {
  struct kept *kept = allocate(1, sizeof *kept);
  kept->options = options;
  check_case("%d hosts, %d bits", hosts, options.bits);
  on_hosts(4, hosts, train_two_rounds, kept);
  float *consensus = parts_values(&kept->parts, SECTION_CONSENSUS);
  for (int rank = 0; rank < 4; rank++) {
    const size_t count = check_part(&kept->parts, rank, consensus);
    CHECK(count >= low && count <= high, "rank %d keeps %zu", rank, count);
  }
  checks_must_hold();
  free(consensus);
  free_parts(&kept->parts);
  free(kept);
}

Test(outer_keeps, the_residual_in_the_parameters) {
  onebit_outer_options_t options = outer_options(1, ONEBIT_OUTER_MEAN);
  check_kept(options, 1, 500, 521);
  options.bits = 4;
  check_kept(options, 1, 500, 521);
  options.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  check_kept(options, 2, 150, 370);
  options.no_error_feedback = 1;
  check_kept(options, 2, 0, 0);
  options.bits = ONEBIT_OUTER_DENSE;
  options.no_error_feedback = 0;
  check_kept(options, 2, 0, 0);
}
