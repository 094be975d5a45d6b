/* Reads the lines of rules, which are words separated by blanks, and applies rules to calls. */
#define _POSIX_C_SOURCE 200809L
#include "dropin/rules.h"

#include <fcntl.h>
#include <string.h>

#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/knobs.h"
#include "dropin/elements.h"

struct word {
  const char *at;
  size_t length;
};

struct reader {
  const char *name;
  const char *at, *end;
  int line;
  struct ob_rules *rules;
};

/* The number of bytes of a wrong word that an error message shows. The words of a file may have any
 * length. */
enum { SHOWN = 40 };

static onebit_status_t refuse_word(const struct reader *reader, struct word word, const char *why) {
  char shown[SHOWN + 1];
  size_t length = word.length < SHOWN ? word.length : SHOWN;
  for (size_t i = 0; i < length; i++)
    shown[i] = (char)(word.at[i] > ' ' && word.at[i] <= '~' ? word.at[i] : '?');
  shown[length] = '\0';
  return ob_error(ONEBIT_ERROR_ARGUMENT, "%s:%d: '%s': %s", reader->name, reader->line, shown, why);
}

static bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }
static bool is_line_end(char c) { return c == '\n' || c == ';' || c == '#'; }

/* Reads the next word of the line. Returns false at the end of the line, which the function does
 * not skip. */
static bool read_word(struct reader *reader, struct word *word) {
  while (reader->at < reader->end && is_blank(*reader->at))
    reader->at++;
  word->at = reader->at;
  while (reader->at < reader->end && !is_blank(*reader->at) && !is_line_end(*reader->at))
    reader->at++;
  word->length = (size_t)(reader->at - word->at);
  return word->length > 0;
}

/* Skips the end of a line. ';' ends a line too, but a comment ends only at a newline. */
static void skip_line_end(struct reader *reader) {
  if (reader->at < reader->end && *reader->at == '#')
    while (reader->at < reader->end && *reader->at != '\n')
      reader->at++;
  if (reader->at < reader->end)
    reader->line += *reader->at++ == '\n';
}

static bool word_equals(struct word word, const char *text) {
  return strlen(text) == word.length && !memcmp(text, word.at, word.length);
}

/* Parses an integer. K, M or G after it multiplies it by a power of 1024. */
static bool parse_integer(struct word word, uint64_t *number) {
  static const char suffixes[] = "KMG";
  size_t digits = 0;
  *number = 0;
  for (; digits < word.length && word.at[digits] >= '0' && word.at[digits] <= '9'; digits++) {
    if (*number > (UINT64_MAX >> 31) / 10) /* leaves space for the factor of a suffix */
      return false;
    *number = *number * 10 + (uint64_t)(word.at[digits] - '0');
  }
  if (!digits || word.length - digits > 1)
    return false;
  if (word.length == digits)
    return true;
  const char *suffix = memchr(suffixes, word.at[digits], sizeof suffixes - 1);
  if (suffix)
    *number <<= 10 * (suffix - suffixes + 1);
  return suffix;
}

/* ---- Conditions: KEY<SIGN>NUMBER ---- */

static const struct {
  const char *name;
  enum ob_rule_key key;
} keys[] = {{"bytes", OB_RULE_BYTES}, {"count", OB_RULE_COUNT}, {"comm-size", OB_RULE_COMM_SIZE}};

static const char condition_message[] = "expected an operation, a type, bits=, or a comparison "
                                        "with bytes, count or comm-size, e.g. bytes>=1M";
static const char bits_message[] = "expected 1, 2, 4 or 8 bits, a range such as 1..8, or auto";
static const char number_message[] = "a sign (= != < <= > >=) needs a whole number after it, which "
                                     "may end in K, M or G";

static void narrow_range(struct ob_rule_range *range, struct word sign, uint64_t number) {
  if (word_equals(sign, "!=")) {
    range->except = number;
    range->excepts = true;
  }
  bool none =
      (word_equals(sign, "<") && number == 0) || (word_equals(sign, ">") && number == UINT64_MAX);
  uint64_t low = word_equals(sign, ">=") || word_equals(sign, "=") ? number
                 : word_equals(sign, ">")                          ? number + 1
                                                                   : 0;
  uint64_t high = word_equals(sign, "<=") || word_equals(sign, "=") ? number
                  : word_equals(sign, "<")                          ? number - 1
                                                                    : UINT64_MAX;
  if (none) {
    low = UINT64_MAX;
    high = 0;
  }
  range->low = low > range->low ? low : range->low;
  range->high = high < range->high ? high : range->high;
}

static bool is_comparison(struct word sign) {
  return word_equals(sign, "=") || word_equals(sign, "!=") || word_equals(sign, "<") ||
         word_equals(sign, "<=") || word_equals(sign, ">") || word_equals(sign, ">=");
}

static onebit_status_t parse_condition(const struct reader *reader, struct word word,
                                       struct ob_rule *rule) {
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
    size_t length = strlen(keys[i].name);
    if (word.length <= length || memcmp(word.at, keys[i].name, length) != 0)
      continue;
    struct word sign = {word.at + length, 0};
    while (length + sign.length < word.length && strchr("=!<>", sign.at[sign.length]) &&
           sign.at[sign.length])
      sign.length++;
    struct word digits = {sign.at + sign.length, word.length - length - sign.length};
    uint64_t number;
    if (!sign.length)
      break;
    if (!is_comparison(sign) || !parse_integer(digits, &number))
      return refuse_word(reader, word, number_message);
    struct ob_rule_range *range = &rule->range[keys[i].key];
    if (word_equals(sign, "!=") && range->excepts)
      return refuse_word(reader, word, "a rule can have one != for each key: write a second rule");
    narrow_range(range, sign, number);
    return ONEBIT_OK;
  }
  return refuse_word(reader, word, condition_message);
}

/* ---- Operations and types: lists of names, separated by commas ---- */

struct name {
  const char *name;
  unsigned bits;
};

static const struct name operations[] = {
    {"allreduce", 1U << ONEBIT_ALLREDUCE},
    {"allgather", 1U << ONEBIT_ALLGATHER},
    {"reduce-scatter", 1U << ONEBIT_REDUCE_SCATTER},
    {"all", 1U << ONEBIT_ALLREDUCE | 1U << ONEBIT_ALLGATHER | 1U << ONEBIT_REDUCE_SCATTER}};
static const struct name dtypes[] = {{"float", 1U << ONEBIT_FLOAT32},
                                     {"bfloat16", 1U << ONEBIT_BFLOAT16},
                                     {"half", 1U << ONEBIT_FLOAT16},
                                     {"double", 1U << OB_DOUBLE}};

/* Returns the bits of the names in a list; 0 if a name is not in the table. */
static unsigned parse_names(struct word list, const struct name *table, size_t rows) {
  unsigned bits = 0;
  const char *end = list.at + list.length;
  for (const char *at = list.at; at <= end; at++) {
    const char *comma = memchr(at, ',', (size_t)(end - at));
    struct word one = {at, (size_t)((comma ? comma : end) - at)};
    unsigned found = 0;
    for (size_t i = 0; i < rows; i++)
      found |= word_equals(one, table[i].name) ? table[i].bits : 0;
    if (!found)
      return 0;
    bits |= found;
    at += one.length;
  }
  return bits;
}

/* Parses the word bits=, which says to how many bits a rule compresses its calls. *was: true if the
 * word is bits=. */
static onebit_status_t parse_bits_condition(const struct reader *reader, struct word word,
                                            struct ob_rule *rule, bool *was) {
  static const char prefix[] = "bits=";
  const size_t length = sizeof prefix - 1;
  *was = word.length > length && !memcmp(word.at, prefix, length);
  if (!*was)
    return ONEBIT_OK;
  if (!rule->compress)
    return refuse_word(reader, word, "a pass rule takes no bits, since its calls stay dense");
  if (!ob_bits_parse(word.at + length, word.length - length, &rule->bits))
    return refuse_word(reader, word, bits_message);
  return ONEBIT_OK;
}

static onebit_status_t parse_rule(struct reader *reader, struct word first, bool compress) {
  struct ob_rules *rules = reader->rules;
  if (rules->rules == OB_MAX_RULES)
    return refuse_word(reader, first, "there are more than 64 rules");
  struct ob_rule rule = {.compress = compress};
  for (size_t key = 0; key < OB_RULE_KEYS; key++)
    rule.range[key].high = UINT64_MAX;
  for (struct word word; read_word(reader, &word);) {
    unsigned operation = parse_names(word, operations, sizeof operations / sizeof operations[0]);
    unsigned dtype = parse_names(word, dtypes, sizeof dtypes / sizeof dtypes[0]);
    rule.operations |= operation;
    rule.dtypes |= dtype;
    bool was = operation || dtype;
    if (!was)
      OB_TRY(parse_bits_condition(reader, word, &rule, &was));
    if (!was)
      OB_TRY(parse_condition(reader, word, &rule));
  }
  if (!rule.operations)
    return refuse_word(reader, first,
                       "names no operation: allreduce, reduce-scatter, allgather or all");
  if (!rule.dtypes)
    rule.dtypes = ~0U;
  rules->rule[rules->rules++] = rule;
  return ONEBIT_OK;
}

/* ---- Lines ---- */

static onebit_status_t parse_number(struct reader *reader, struct word first, uint64_t low,
                                    uint64_t high, const char *expected, uint64_t *number) {
  struct word word, more;
  if (!read_word(reader, &word))
    return refuse_word(reader, first, "needs a number after it");
  if (!parse_integer(word, number) || *number < low || *number > high)
    return refuse_word(reader, word, expected);
  if (read_word(reader, &more))
    return refuse_word(reader, more, "only one number is expected");
  return ONEBIT_OK;
}

/* The range of `warmup`: the library knows that a step repeats only after the step has been made
 * twice. */
enum { MIN_WARMUP = 2, MAX_WARMUP = 1000000 };

static onebit_status_t parse_bits(struct reader *reader, struct word first) {
  struct word word, more;
  if (!read_word(reader, &word))
    return refuse_word(reader, first, "needs a number after it");
  if (!ob_bits_parse(word.at, word.length, &reader->rules->bits))
    return refuse_word(reader, word, bits_message);
  return read_word(reader, &more) ? refuse_word(reader, more, "only one word is expected")
                                  : ONEBIT_OK;
}

static onebit_status_t parse_line(struct reader *reader, struct word first) {
  uint64_t number;
  if (word_equals(first, "compress") || word_equals(first, "pass"))
    return parse_rule(reader, first, word_equals(first, "compress"));
  if (word_equals(first, "least")) {
    OB_TRY(parse_number(reader, first, 0, SIZE_MAX / 2, "expected an integer, e.g. 64K", &number));
    reader->rules->min_bytes = (size_t)number;
    return ONEBIT_OK;
  }
  if (word_equals(first, "warmup")) {
    OB_TRY(parse_number(reader, first, MIN_WARMUP, MAX_WARMUP,
                        "expected an integer from 2 to 1000000", &number));
    reader->rules->warmup = (unsigned)number;
    return ONEBIT_OK;
  }
  if (word_equals(first, "bits"))
    return parse_bits(reader, first);
  return refuse_word(reader, first, "a line begins with compress, pass, bits, least or warmup");
}

onebit_status_t ob_rules_parse(const char *name, const char *text, size_t length,
                               struct ob_rules *rules) {
  struct reader reader = {name, text, text + length, 1, rules};
  memset(rules, 0, sizeof *rules);
  rules->min_bytes = OB_RULES_MIN_BYTES;
  rules->warmup = OB_RULES_WARMUP;
  while (reader.at < reader.end) {
    struct word first;
    if (read_word(&reader, &first))
      OB_TRY(parse_line(&reader, first));
    skip_line_end(&reader);
  }
  return ONEBIT_OK;
}

/* ---- Applying rules to calls ---- */

/* Returns the number of bytes that a rank passes to such a call. The key `bytes` of a rule compares
 * this number. */
static uint64_t rules_call_bytes(onebit_operation_t operation, onebit_dtype_t dtype, size_t count,
                                 int comm_size) {
  uint64_t ranks = operation == ONEBIT_REDUCE_SCATTER ? (uint64_t)comm_size : 1;
  return ranks * ob_elements_size(dtype) * count;
}

static bool rule_fits(const struct ob_rule *rule, onebit_operation_t operation,
                      onebit_dtype_t dtype, const uint64_t values[OB_RULE_KEYS]) {
  bool good = (rule->operations >> operation & 1U) && (rule->dtypes >> dtype & 1U);
  for (size_t key = 0; key < OB_RULE_KEYS && good; key++) {
    const struct ob_rule_range *range = &rule->range[key];
    good = values[key] >= range->low && values[key] <= range->high &&
           !(range->excepts && values[key] == range->except);
  }
  return good;
}

/* Returns the first rule that fits the call, or NULL. */
static const struct ob_rule *rules_find(const struct ob_rules *rules, onebit_operation_t operation,
                                        onebit_dtype_t dtype, size_t count, int comm_size) {
  const uint64_t values[OB_RULE_KEYS] = {[OB_RULE_BYTES] =
                                             rules_call_bytes(operation, dtype, count, comm_size),
                                         [OB_RULE_COUNT] = count,
                                         [OB_RULE_COMM_SIZE] = (uint64_t)comm_size};
  for (size_t i = 0; i < rules->rules; i++)
    if (rule_fits(&rules->rule[i], operation, dtype, values))
      return &rules->rule[i];
  return NULL;
}

enum ob_reason ob_rules_judge(const struct ob_rules *rules, onebit_operation_t operation,
                              onebit_dtype_t dtype, size_t count, int comm_size) {
  const struct ob_rule *rule = rules_find(rules, operation, dtype, count, comm_size);
  if (rule || operation != ONEBIT_ALLREDUCE)
    return rule && rule->compress ? OB_REASON_NONE : OB_REASON_RULE;
  if (rules_call_bytes(operation, dtype, count, comm_size) < rules->min_bytes)
    return OB_REASON_SMALL;
  return rules->gradients ? OB_REASON_NONE : OB_REASON_WATCHED;
}

bool ob_rules_can_compress(const struct ob_rules *rules) {
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

bool ob_rules_have_bit_range(const struct ob_rules *rules) {
  bool moves = rules->bits.max > rules->bits.min;
  for (size_t i = 0; i < rules->rules; i++)
    moves = moves || rules->rule[i].bits.max > rules->rule[i].bits.min;
  return moves;
}

onebit_status_t ob_rules_apply_environment(int fallback, struct ob_rules *rules) {
  int gradients = 0;
  OB_TRY(ob_knob_number(OB_KNOB_GRADIENTS, 0, 1, 0, &gradients));
  rules->gradients = gradients;
  OB_TRY(ob_knob_budget(&rules->budget));
  if (rules->bits.min == 0 && rules->budget > 0 && !ob_knob_text(OB_KNOB_BITS))
    rules->bits = (struct ob_bits){1, 8};
  return rules->bits.min ? ONEBIT_OK : ob_knob_bits(fallback, &rules->bits);
}

/* Returns the smallest number of elements that can have `bytes` bytes: elements of the widest type,
 * with the largest number of ranks. */
static uint64_t min_elements(uint64_t bytes, onebit_operation_t operation) {
  return operation == ONEBIT_REDUCE_SCATTER ? bytes > 0 : bytes / sizeof(double);
}

size_t ob_rules_min_count(const struct ob_rules *rules, onebit_operation_t operation) {
  uint64_t min =
      operation == ONEBIT_ALLREDUCE ? min_elements(rules->min_bytes, operation) : SIZE_MAX;
  for (size_t i = 0; i < rules->rules; i++) {
    const struct ob_rule *rule = &rules->rule[i];
    if (!rule->compress || !(rule->operations >> operation & 1U))
      continue;
    uint64_t low = min_elements(rule->range[OB_RULE_BYTES].low, operation);
    uint64_t count = rule->range[OB_RULE_COUNT].low;
    low = low > count ? low : count;
    min = low < min ? low : min;
  }
  return min > 0 ? (size_t)min : 1; /* a call without elements is not compressed */
}

/* Adds a value to a hash. Structs are hashed field by field, since their padding is undefined. */
static uint64_t rules_hash_value(uint64_t hash, uint64_t value) {
  return ob_hash(hash, &value, sizeof value);
}

static uint64_t rules_hash_bits(uint64_t hash, struct ob_bits bits) {
  return rules_hash_value(rules_hash_value(hash, (uint64_t)bits.min), (uint64_t)bits.max);
}

uint64_t ob_rules_hash(const struct ob_rules *rules) {
  uint64_t hash =
      rules_hash_value(rules_hash_value(OB_HASH_START, rules->min_bytes), rules->warmup);
  hash = ob_hash(rules_hash_bits(hash, rules->bits), &rules->budget, sizeof rules->budget);
  hash = rules->gradients ? rules_hash_value(hash, true) : hash;
  for (size_t i = 0; i < rules->rules; i++) {
    const struct ob_rule *rule = &rules->rule[i];
    hash = rules_hash_value(
        rules_hash_value(rules_hash_value(hash, rule->compress), rule->operations), rule->dtypes);
    hash = rules_hash_bits(hash, rule->bits);
    for (size_t key = 0; key < OB_RULE_KEYS; key++) {
      const struct ob_rule_range *range = &rule->range[key];
      hash = rules_hash_value(rules_hash_value(hash, range->low), range->high);
      hash = range->excepts ? rules_hash_value(hash, range->except) : hash;
    }
  }
  return hash;
}

/* The largest size of a file of rules: the file is read as a whole. */
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
    return ob_error(ONEBIT_ERROR_FILE, "%s: the rules have more than %d bytes", path,
                    (int)MAX_FILE_BYTES);
  return ob_rules_parse(path, text, (size_t)input.bytes, rules);
}

static bool is_rule_text(const char *value) {
  static const char *const keywords[] = {"compress", "pass", "least", "warmup", "bits"};
  size_t length = strcspn(value, " \t\n;");
  for (size_t i = 0; i < sizeof keywords / sizeof keywords[0]; i++)
    if (strlen(keywords[i]) == length && !strncmp(keywords[i], value, length) && value[length])
      return true;
  return false;
}

onebit_status_t ob_rules_load(const char *value, struct ob_rules *rules) {
  if (!value || is_rule_text(value))
    return ob_rules_parse("ONEBIT_RULES", value ? value : "", value ? strlen(value) : 0, rules);
  return load_file(value, rules);
}
