/* Applies rules to calls, and loads them. dropin/rules_parse.c reads their lines. */
#define _POSIX_C_SOURCE 200809L
#include "dropin/rules.h"

#include <fcntl.h>
#include <string.h>

#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/knobs.h"
#include "dropin/elements.h"

/* The meaning of `bytes` in a rule: the bytes that a rank gives to such a call. */
static uint64_t rules_bytes_of(onebit_operation_t operation, onebit_dtype_t dtype, size_t count,
                               int comm_size) {
  uint64_t ranks = operation == ONEBIT_REDUCE_SCATTER ? (uint64_t)comm_size : 1;
  return ranks * ob_elements_size(dtype) * count;
}

static bool rules_fits(const struct ob_rule *rule, onebit_operation_t operation,
                       onebit_dtype_t dtype, const uint64_t values[OB_RULE_KEYS]) {
  bool good = (rule->operations >> operation & 1U) && (rule->dtypes >> dtype & 1U);
  for (size_t key = 0; key < OB_RULE_KEYS && good; key++) {
    const struct ob_rule_range *range = &rule->range[key];
    good = values[key] >= range->low && values[key] <= range->high &&
           !(range->excepts && values[key] == range->except);
  }
  return good;
}

/* The first rule that fits, or NULL. */
static const struct ob_rule *rules_find(const struct ob_rules *rules, onebit_operation_t operation,
                                        onebit_dtype_t dtype, size_t count, int comm_size) {
  const uint64_t values[OB_RULE_KEYS] = {[OB_RULE_BYTES] =
                                             rules_bytes_of(operation, dtype, count, comm_size),
                                         [OB_RULE_COUNT] = count,
                                         [OB_RULE_COMM_SIZE] = (uint64_t)comm_size};
  for (size_t i = 0; i < rules->rules; i++)
    if (rules_fits(&rules->rule[i], operation, dtype, values))
      return &rules->rule[i];
  return NULL;
}

enum ob_reason ob_rules_judge(const struct ob_rules *rules, onebit_operation_t operation,
                              onebit_dtype_t dtype, size_t count, int comm_size) {
  const struct ob_rule *rule = rules_find(rules, operation, dtype, count, comm_size);
  if (rule || operation != ONEBIT_ALLREDUCE)
    return rule && rule->compress ? OB_REASON_NONE : OB_REASON_RULE;
  if (rules_bytes_of(operation, dtype, count, comm_size) < rules->min_bytes)
    return OB_REASON_SMALL;
  return rules->gradients ? OB_REASON_NONE : OB_REASON_WATCHED;
}

bool ob_rules_ask(const struct ob_rules *rules) {
  bool asks = rules->gradients;
  for (size_t i = 0; i < rules->rules; i++)
    asks = asks || rules->rule[i].compress;
  return asks;
}

struct ob_bits ob_rules_bits(const struct ob_rules *rules, onebit_operation_t operation,
                             onebit_dtype_t dtype, size_t count, int comm_size) {
  const struct ob_rule *rule = rules_find(rules, operation, dtype, count, comm_size);
  return rule && rule->bits.min ? rule->bits : rules->bits;
}

bool ob_rules_move(const struct ob_rules *rules) {
  bool moves = rules->bits.max > rules->bits.min;
  for (size_t i = 0; i < rules->rules; i++)
    moves = moves || rules->rule[i].bits.max > rules->rule[i].bits.min;
  return moves;
}

onebit_status_t ob_rules_settle(int fallback, struct ob_rules *rules) {
  int gradients = 0;
  OB_TRY(ob_knob_number(OB_KNOB_GRADIENTS, 0, 1, 0, &gradients));
  rules->gradients = gradients;
  OB_TRY(ob_knob_budget(&rules->budget));
  if (rules->bits.min == 0 && rules->budget > 0 && !ob_knob_text(OB_KNOB_BITS))
    rules->bits = (struct ob_bits){1, 8};
  return rules->bits.min ? ONEBIT_OK : ob_knob_bits(fallback, &rules->bits);
}

/* The least number of elements that may have so many bytes: those of the widest type, on the most
 * ranks. */
static uint64_t min_elements_of(uint64_t bytes, onebit_operation_t operation) {
  return operation == ONEBIT_REDUCE_SCATTER ? bytes > 0 : bytes / sizeof(double);
}

size_t ob_rules_min_count(const struct ob_rules *rules, onebit_operation_t operation) {
  uint64_t min =
      operation == ONEBIT_ALLREDUCE ? min_elements_of(rules->min_bytes, operation) : SIZE_MAX;
  for (size_t i = 0; i < rules->rules; i++) {
    const struct ob_rule *rule = &rules->rule[i];
    if (!rule->compress || !(rule->operations >> operation & 1U))
      continue;
    uint64_t low = min_elements_of(rule->range[OB_RULE_BYTES].low, operation);
    uint64_t count = rule->range[OB_RULE_COUNT].low;
    low = low > count ? low : count;
    min = low < min ? low : min;
  }
  return min > 0 ? (size_t)min : 1; /* nothing is no call to compress */
}

/* Hashes field by field: a struct's padding is anything. */
static uint64_t rules_mix(uint64_t hash, uint64_t value) {
  return ob_hash(hash, &value, sizeof value);
}

static uint64_t mix_bits(uint64_t hash, struct ob_bits bits) {
  return rules_mix(rules_mix(hash, (uint64_t)bits.min), (uint64_t)bits.max);
}

uint64_t ob_rules_hash(const struct ob_rules *rules) {
  uint64_t hash = rules_mix(rules_mix(OB_HASH_START, rules->min_bytes), rules->warmup);
  hash = ob_hash(mix_bits(hash, rules->bits), &rules->budget, sizeof rules->budget);
  hash = rules->gradients ? rules_mix(hash, true) : hash;
  for (size_t i = 0; i < rules->rules; i++) {
    const struct ob_rule *rule = &rules->rule[i];
    hash = rules_mix(rules_mix(rules_mix(hash, rule->compress), rule->operations), rule->dtypes);
    hash = mix_bits(hash, rule->bits);
    for (size_t key = 0; key < OB_RULE_KEYS; key++) {
      const struct ob_rule_range *range = &rule->range[key];
      hash = rules_mix(rules_mix(hash, range->low), range->high);
      hash = range->excepts ? rules_mix(hash, range->except) : hash;
    }
  }
  return hash;
}

/* Rules are read whole; nobody writes so many by hand. */
enum { MAX_FILE_BYTES = 64 << 10 };

static onebit_status_t load_file(const char *path, struct ob_rules *rules) {
  char text[MAX_FILE_BYTES], reason[OB_INPUT_REASON];
  struct ob_input input;
  int code = ob_input_open(&input, AT_FDCWD, path);
  bool fits = input.bytes <= MAX_FILE_BYTES;
  if (code == 0 && fits)
    code = ob_input_read(&input, 0, text, (size_t)input.bytes);
  ob_input_close(&input);
  if (code != 0)
    return ob_error(ONEBIT_ERROR_FILE, "%s: %s", path, ob_input_reason(code, reason));
  if (!fits)
    return ob_error(ONEBIT_ERROR_FILE, "%s: rules of more than %d bytes", path,
                    (int)MAX_FILE_BYTES);
  return ob_rules_parse(path, text, (size_t)input.bytes, rules);
}

static bool is_text(const char *value) {
  static const char *const keywords[] = {"compress", "pass", "least", "warmup", "bits"};
  size_t length = strcspn(value, " \t\n;");
  for (size_t i = 0; i < sizeof keywords / sizeof keywords[0]; i++)
    if (strlen(keywords[i]) == length && !strncmp(keywords[i], value, length) && value[length])
      return true;
  return false;
}

onebit_status_t ob_rules_load(const char *value, struct ob_rules *rules) {
  if (!value || is_text(value))
    return ob_rules_parse("ONEBIT_RULES", value ? value : "", value ? strlen(value) : 0, rules);
  return load_file(value, rules);
}
