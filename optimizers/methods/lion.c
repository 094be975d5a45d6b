/* The functions of Lion in one bit. Ranks send normalised gradients and keep no momentum. The
 * server of a segment keeps the momentum and sends the signs of a step (OB_SERVE_LION,
 * codec_compress.h), which ranks apply with OB_PASS_STEP. */
#include "onebit/lion.h"

#include "base/call_scope.h"
#include "optimizers/optimizer.h"

static void lion_call(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                      struct ob_call *call) {
  bucket->sink = ob_bucket_make_sink(optimizer, bucket, OB_PASS_STEP, optimizer->steps + 1);
  call->source.weight = 1;
  ob_fill_moments_call(optimizer, bucket, optimizer->steps + 1, call);
  call->sink = &bucket->sink;
  call->hold = optimizer->bucket_count > 1;
}

/* --- The method's row. Option beta2 sets server_beta; beta3 sets the moments' beta2 ------------*/

#define OPTIONS onebit_lion_options_t
static const struct ob_option options_of[] = {
    OB_FRACTION(beta1, beta1, 0.9),
    OB_FRACTION(beta2, server_beta, 0.99),
    OB_FRACTION(beta3, beta2, 0.999),
    OB_POSITIVE(epsilon, epsilon, 1e-8),
};

const struct ob_method ob_method_lion = {
    .name = "lion",
    OB_OPTIONS("ONEBIT_LION_OPTIONS_INIT", options_of),
    .initial = {.no_warmup = true, .freeze_step = ONEBIT_FREEZE_NEVER},
    .recommended = "Efficient-Adam (onebit_efficient_adam_create) for these",
    .not_where = " where most parameters are tables of words",
    .not_deepspeeds = "Lion in one bit",
    .moments = true,
    .serve_rule = OB_SERVE_LION,
    .dense_pass = OB_PASS_LION,
    .call = lion_call,
    .update = ob_buckets_apply};

OB_METHOD_CREATE(lion)
