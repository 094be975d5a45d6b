/* The optimizers' passes in memory of the processor. */
#include "optimizers/optimizer.h"

static onebit_status_t pass_on_host(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                    const struct ob_pass_sink *sink) {
  (void)optimizer;
  ob_pass_blocks(ob_plan_work(bucket->bits), NULL, NULL, NULL, sink);
  return ONEBIT_OK;
}

static onebit_status_t sum_on_host(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                   int which, size_t first, size_t end, double *sum) {
  (void)optimizer;
  *sum = ob_total_of(which, bucket->sums[which] + first, end - first);
  return ONEBIT_OK;
}

static onebit_status_t check_on_host(const char *name, const void *array) {
  return ob_executor_check_host(NULL, name, array);
}

static onebit_status_t no_bucket(struct onebit_optimizer *optimizer, struct ob_bucket *bucket) {
  (void)optimizer, (void)bucket;
  return ONEBIT_OK;
}

static void nothing(struct ob_bucket *bucket) { (void)bucket; }

static onebit_status_t no_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                               struct ob_call *call) {
  (void)optimizer, (void)bucket, (void)call;
  return ONEBIT_OK;
}

static onebit_status_t no_piece(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                                size_t piece) {
  (void)optimizer, (void)bucket, (void)piece;
  return ONEBIT_OK;
}

static onebit_status_t not_needed(struct onebit_optimizer *optimizer) {
  (void)optimizer;
  return ONEBIT_OK;
}

const struct ob_optimizer_executor ob_optimizer_executor_host = {.check = check_on_host,
                                                                 .create = no_bucket,
                                                                 .destroy = nothing,
                                                                 .prepare = no_call,
                                                                 .join = not_needed,
                                                                 .pass = pass_on_host,
                                                                 .sum = sum_on_host,
                                                                 .lamb = ob_lamb_on_host,
                                                                 .repoint = no_piece,
                                                                 .reweigh = no_piece,
                                                                 .serve = nothing,
                                                                 .finish = not_needed,
                                                                 .wait = not_needed};
