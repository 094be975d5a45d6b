/*
 * Tests how the drop-ins recognise loops of calls, on a single rank. tests/scripts/check-preload
 * tests it with several ranks.
 */
#include "base/memory.h"
#include "dropin/loops.h"
#include "tests/support.h"

enum { REPEATS = 3 };

static bool answers = true;
static int questions;

static bool agree_on_largest(void *context, int64_t *values, int count) {
  (void)context, (void)values, (void)count;
  questions++;
  return answers;
}

static struct ob_loops *make_loops(void) {
  struct ob_loops *loops;
  CHECK_STATUS(ob_loops_create(REPEATS, agree_on_largest, NULL, &loops), ONEBIT_OK);
  return loops;
}

static char memory[1000];
static size_t fresh; /* the next unused buffer */

/* Makes a call for each character of a text. A lower-case letter is a sum that is too small to be
 * examined, an upper-case letter is a call with buffers of its own, and a digit is a call with new
 * buffers. Returns the position of the last call. */
static int make_calls(struct ob_loops *loops, const char *text) {
  int position = OB_NO_POSITION;
  for (; *text; text++) {
    bool look, own = *text >= 'A' && *text <= 'Z';
    const char *at = memory + (own ? (size_t)*text : 100 + fresh++ % 800);
    if (*text >= 'a') {
      ob_loops_note(loops, (uint64_t)*text);
      continue;
    }
    position = ob_loops_position(loops, own ? 7 : (uint64_t)*text, at, at, &look);
    if (look)
      ob_loops_find_loop(loops);
  }
  return position;
}

static void repeat_calls(struct ob_loops *loops, const char *text, int times) {
  for (int i = 0; i < times; i++)
    make_calls(loops, text);
}

Test(loops, places_are_found_by_position_in_new_buffers) {
  struct ob_loops *loops = make_loops();
  cr_expect_eq(ob_loops_reason(loops), OB_REASON_LEARNING);
  repeat_calls(loops, "123", 16 * REPEATS);
  int one = make_calls(loops, "1"), two = make_calls(loops, "2"), three = make_calls(loops, "3");
  cr_expect(one >= 0 && two >= 0 && three >= 0 && one != two && two != three && one != three);
  cr_expect_eq(make_calls(loops, "1"), one);
  *ob_loops_tensor(loops, two) = 5;
  cr_expect(*ob_loops_tensor(loops, one) == 0 && *ob_loops_tensor(loops, two) == 5);
  ob_loops_remove_tensor(loops, 5);
  cr_expect_eq(*ob_loops_tensor(loops, two), 0);
  uint64_t signature = (uint64_t)'2';
  cr_expect_eq(ob_loops_find(loops, signature, OB_NO_POSITION), two);
  cr_expect_eq(ob_loops_find(loops, signature, two), two); /* one round later */
  cr_expect_eq(ob_loops_find(loops, 99, OB_NO_POSITION), OB_NO_POSITION);
  ob_loops_destroy(loops);
}

Test(loops, equal_calls_are_told_apart_by_small_ones_and_by_buffers) {
  static const char *const texts[] = {"1a1b", "AB", "ABCD"};
  for (size_t i = 0; i < 3; i++) {
    struct ob_loops *loops = make_loops();
    repeat_calls(loops, texts[i], 16 * REPEATS);
    int one = make_calls(loops, i ? "A" : "1a"), two = make_calls(loops, i ? "B" : "1b");
    cr_expect(one >= 0 && two >= 0 && one != two, "%s: %d %d", texts[i], one, two);
    ob_loops_destroy(loops);
  }
}

Test(loops, a_program_goes_from_one_loop_to_another_and_back) {
  struct ob_loops *loops = make_loops();
  repeat_calls(loops, "a1b2", 16 * REPEATS);
  int one = make_calls(loops, "a1"), two = make_calls(loops, "b2");
  repeat_calls(loops, "c1b2", 16 * REPEATS);
  int other = make_calls(loops, "c1");
  cr_expect(one >= 0 && other >= 0 && other != one);
  make_calls(loops, "b2");
  for (int turn = 0; turn < 3; turn++) {
    /* The loop is certain after one repetition of its calls. */
    cr_expect_eq(make_calls(loops, "x1"), OB_NO_POSITION);
    cr_expect_eq(make_calls(loops, "b2"), OB_NO_POSITION);
    repeat_calls(loops, "a1b2", 1);
    cr_expect_eq(make_calls(loops, "a1"), one);
    cr_expect_eq(make_calls(loops, "b2"), two);
    repeat_calls(loops, "c1b2", 2);
    cr_expect_eq(make_calls(loops, "c1"), other);
    make_calls(loops, "b2");
  }
  ob_loops_destroy(loops);
}

/* After "k" the first call of "ab1e" is mistaken for the first call of "kab1cd". The next call
 * reveals the mistake. */
Test(loops, a_loop_that_is_left_is_told) {
  struct ob_loops *loops = make_loops();
  int first, count;
  repeat_calls(loops, "kab1cd", 16 * REPEATS);
  int policy = make_calls(loops, "kab1cd");
  ob_loops_read_left_positions(loops, &first, &count);
  cr_expect(policy >= 0 && count == 0);
  make_calls(loops, "k");
  cr_expect_eq(make_calls(loops, "ab1e"), policy);
  ob_loops_read_left_positions(loops, &first, &count);
  cr_expect_eq(count, 0);
  cr_expect_neq(make_calls(loops, "ab1e"), policy);
  ob_loops_read_left_positions(loops, &first, &count);
  cr_expect(count == 1 && first == policy, "%d from %d on", count, first);
  repeat_calls(loops, "ab1e", 16 * REPEATS);
  int value = make_calls(loops, "ab1e");
  ob_loops_read_left_positions(loops, &first, &count);
  cr_expect(value >= 0 && value != policy && count == 0);
  ob_loops_destroy(loops);
}

Test(loops, what_is_not_certain_has_no_place) {
  struct ob_loops *loops = make_loops();
  repeat_calls(loops, "12", 16 * REPEATS);
  int one = make_calls(loops, "1");
  make_calls(loops, "2");
  cr_expect_eq(make_calls(loops, "x1"), OB_NO_POSITION); /* other small sums come before it */
  cr_expect_eq(make_calls(loops, "2"), OB_NO_POSITION);
  cr_expect_eq(make_calls(loops, "12"), OB_NO_POSITION + 1 + make_calls(loops, "12"));
  cr_expect_eq(make_calls(loops, "1"), one);
  cr_expect_eq(make_calls(loops, "3"), OB_NO_POSITION); /* never seen */
  repeat_calls(loops, "12", 2);
  cr_expect_eq(make_calls(loops, "1"), one);
  ob_loops_destroy(loops);
}

Test(loops, an_order_that_does_not_repeat_is_told) {
  struct ob_loops *loops = make_loops();
  uint64_t state = 1;
  for (int i = 0; i < 2000; i++) {
    const char text[] = {(char)('0' + (state >> 60)), '\0'};
    state = state * 6364136223846793005U + 1442695040888963407U;
    cr_expect_eq(ob_loops_reason(loops), i < 700 ? OB_REASON_LEARNING : ob_loops_reason(loops));
    make_calls(loops, text);
  }
  cr_expect_eq(ob_loops_reason(loops), OB_REASON_UNSTABLE);
  ob_loops_destroy(loops);
}

Test(loops, ranks_that_do_not_answer_and_no_memory) {
  struct ob_loops *loops = make_loops();
  answers = false;
  repeat_calls(loops, "12", 20);
  cr_expect(questions > 0);
  cr_expect_eq(make_calls(loops, "1"), OB_NO_POSITION);
  ob_loops_destroy(loops);
  ob_loops_destroy(NULL);
  ob_memory_fail_at(1);
  CHECK_STATUS(ob_loops_create(2, agree_on_largest, NULL, &loops), ONEBIT_ERROR_MEMORY);
  ob_memory_fail_at(0);
  CHECK_STATUS(ob_loops_create(1, agree_on_largest, NULL, &loops), ONEBIT_ERROR_ARGUMENT);
}

/* With fixed buffers a loop is recognised in its third round, whatever calls were made before
 * it. */
Test(loops, two_rounds_show_a_loop) {
  struct ob_loops *loops;
  CHECK_STATUS(ob_loops_create(2, agree_on_largest, NULL, &loops), ONEBIT_OK);
  make_calls(loops, "xAaB");
  cr_expect_eq(make_calls(loops, "bA"), OB_NO_POSITION);
  ob_loops_set_last_tensor(loops, 9); /* the number that ranks have agreed on in the meantime */
  cr_expect_eq(make_calls(loops, "aB"), OB_NO_POSITION);
  int one = make_calls(loops, "bA"), two = make_calls(loops, "aB");
  cr_expect(one >= 0 && two >= 0 && one != two, "%d %d", one, two);
  cr_expect(*ob_loops_tensor(loops, one) == 9 && *ob_loops_tensor(loops, two) == 0);
  ob_loops_destroy(loops);
}

/* Equal calls with one pair of buffers may belong to several tensors in turn, so a loop of a single
 * call is recognised only after many repetitions. */
Test(loops, a_single_call_is_watched_for_longer_where_buffers_move) {
  struct ob_loops *loops;
  CHECK_STATUS(ob_loops_create(2, agree_on_largest, NULL, &loops), ONEBIT_OK);
  int first = 0;
  while (make_calls(loops, "1") == OB_NO_POSITION)
    cr_assert_lt(++first, 64);
  cr_expect_geq(first, 16);
  ob_loops_destroy(loops);
}

/* Two equal calls in new buffers do not form a loop of their own within the loop. */
Test(loops, a_part_of_a_loop_is_none) {
  struct ob_loops *loops;
  CHECK_STATUS(ob_loops_create(2, agree_on_largest, NULL, &loops), ONEBIT_OK);
  repeat_calls(loops, "1223", 16);
  int found[4];
  for (int i = 0; i < 4; i++) {
    const char text[] = {"1223"[i], '\0'};
    found[i] = make_calls(loops, text);
    cr_expect(found[i] >= 0 && (i == 0 || found[i] != found[i - 1]), "%d: %d", i, found[i]);
  }
  ob_loops_destroy(loops);
}

/* Many calls that do not repeat come before the loop. */
Test(loops, a_long_beginning_is_overcome) {
  struct ob_loops *loops;
  CHECK_STATUS(ob_loops_create(2, agree_on_largest, NULL, &loops), ONEBIT_OK);
  bool look;
  for (uint64_t call = 0; call < 3000; call++)
    ob_loops_position(loops, 1000 + call, memory, memory, &look);
  repeat_calls(loops, "AB", 200);
  cr_expect(make_calls(loops, "A") >= 0);
  ob_loops_destroy(loops);
}

Test(loops, many_loops_make_room_anew) {
  struct ob_loops *loops = make_loops();
  char text[] = "x11y";
  for (int kind = 0; kind < 40; kind++) {
    text[0] = (char)('a' + kind % 20);
    text[3] = (char)('b' + kind / 20);
    repeat_calls(loops, text, 20);
    cr_expect(make_calls(loops, text) >= 0, "%d", kind);
  }
  ob_loops_destroy(loops);
}
