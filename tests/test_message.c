/* Tests messages and layouts: the parts of a message, messages that the check refuses, and the
 * positions of blocks. */
#include "compression/codec.h"
#include "compression/message.h"
#include "tests/support.h"

static const struct ob_message_shape shape = {.first = 3, .blocks = 2, .words = 65, .width = 1};
static const struct ob_message_call expected = {OB_MESSAGE_WORKER, 7, 100003, 0};

static struct ob_view make_message(unsigned char *memory) {
  struct ob_view view = ob_message_view(memory, &shape);
  memset(memory, 0, ob_message_bytes(&shape));
  *view.header = (struct ob_header){.magic = OB_MESSAGE_MAGIC,
                                    .version = OB_MESSAGE_VERSION,
                                    .kind = OB_MESSAGE_WORKER,
                                    .sequence = 7,
                                    .elements = 100003,
                                    .block = 3};
  view.scales[0] = 1;
  view.scales[1] = 0;
  return view;
}

Test(message, has_the_documented_layout) {
  _Alignas(8) unsigned char memory[512];
  cr_assert_eq(ob_message_bytes(&shape), 40 + 2 * 4 + 65 * 4);
  struct ob_view view = make_message(memory);
  cr_expect_eq((unsigned char *)view.scales - memory, 40);
  cr_expect_eq((unsigned char *)view.words - memory, 48);
  cr_expect_eq(memcmp(memory, "O1B1\3\1\0\0\7\0\0\0", 12), 0);
  struct ob_message_shape one = {.words = 65, .blocks = 2, .width = 1, .one_scale = true};
  struct ob_message_shape dense = {.words = 2, .blocks = 2, .dense = true};
  struct ob_message_shape half = {.words = 2, .blocks = 2, .dense = true, .half = true};
  cr_expect_eq(ob_message_bytes(&one), 40 + 65 * 4);
  cr_expect_eq(ob_message_bytes(&half), 40 + 64 * 2);
  cr_expect_eq(ob_message_bytes(&dense), 40 + 64 * 4);
}

static onebit_status_t check_message(const unsigned char *memory, size_t bytes) {
  return ob_message_check(memory, bytes, &shape, &expected, &ob_codec_scalar);
}

/* Checks that a message is refused although its checksum is correct. */
static void check_refused(unsigned char *memory, size_t bytes, const char *words) {
  ob_message_seal(memory, &shape, &ob_codec_scalar);
  cr_expect_eq(check_message(memory, bytes), ONEBIT_ERROR_MESSAGE, "%s", words);
  cr_expect(strstr(onebit_last_error(), words), "'%s' does not speak of %s", onebit_last_error(),
            words);
}

Test(message, is_refused_when_any_field_is_wrong) {
  _Alignas(8) unsigned char memory[512];
  size_t bytes = ob_message_bytes(&shape);
  struct ob_view view = make_message(memory);
  ob_message_seal(memory, &shape, &ob_codec_scalar);
  cr_assert_eq(check_message(memory, bytes), ONEBIT_OK);
  check_refused(memory, bytes - 1, "bytes");
  check_refused(memory, 0, "bytes");
  view.header->magic++;
  check_refused(memory, bytes, "magic");
  view = make_message(memory);
  view.header->version = 1;
  check_refused(memory, bytes, "version 1, but this library has version 3");
  view = make_message(memory);
  view.header->kind = OB_MESSAGE_SERVER;
  check_refused(memory, bytes, "kind 2");
  view = make_message(memory);
  view.header->flags = OB_FLAG_DENSE;
  check_refused(memory, bytes, "flags 4");
  view = make_message(memory);
  view.header->sequence = 8;
  check_refused(memory, bytes, "call 8, expected call 7");
  view = make_message(memory);
  view.header->sequence = 6; /* an earlier call is refused as well */
  check_refused(memory, bytes, "call 6, expected call 7");
  view = make_message(memory);
  view.header->elements = 5;
  check_refused(memory, bytes, "of 5 elements");
  view = make_message(memory);
  view.header->block = 4;
  check_refused(memory, bytes, "block 4");
}

/* The payload has values of another width, or signs instead of values. */
Test(message, is_refused_when_its_payload_is_another) {
  static const unsigned flags[] = {0, OB_FLAG_DENSE, OB_FLAG_DENSE | OB_FLAG_HALF};
  _Alignas(8) unsigned char memory[512] = {0};
  for (int wanted = 0; wanted < 3; wanted++)
    for (int sent = 0; sent < 3; sent++) {
      struct ob_message_shape dense = {
          .words = 2, .blocks = 1, .one_scale = true, .dense = wanted > 0, .half = wanted > 1};
      struct ob_message_call any = {OB_MESSAGE_WORKER, 7, 100003, 0};
      *ob_message_view(memory, &dense).header = (struct ob_header){.magic = OB_MESSAGE_MAGIC,
                                                                   .version = OB_MESSAGE_VERSION,
                                                                   .kind = OB_MESSAGE_WORKER,
                                                                   .flags = (uint16_t)flags[sent],
                                                                   .sequence = 7,
                                                                   .elements = 100003};
      ob_message_seal(memory, &dense, &ob_codec_scalar);
      cr_expect_eq(
          ob_message_check(memory, ob_message_bytes(&dense), &dense, &any, &ob_codec_scalar),
          sent == wanted ? ONEBIT_OK : ONEBIT_ERROR_MESSAGE, "%d for %d", sent, wanted);
    }
}

Test(message, is_refused_when_a_scale_is_not_one) {
  static const float wrong[] = {NAN, INFINITY, -INFINITY, -1};
  _Alignas(8) unsigned char memory[512];
  size_t bytes = ob_message_bytes(&shape);
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    struct ob_view view = make_message(memory);
    view.scales[1] = wrong[i];
    check_refused(memory, bytes, "for block 4");
    view = make_message(memory);
    view.header->scale = wrong[i];
    check_refused(memory, bytes, "scale");
  }
}

/* --- The checksum ------------------------------------------------------------------------------*/

static uint32_t *random_words(size_t count, uint32_t seed) {
  uint32_t *words = malloc(count * sizeof *words);
  cr_assert(words);
  for (size_t i = 0; i < count; i++)
    words[i] = seed = seed * 1664525u + 1013904223u;
  return words;
}

static void flip_bit(unsigned char *memory, size_t bit) {
  memory[bit / 8] ^= (unsigned char)(1u << bit % 8);
}

Test(message, is_refused_with_any_bit_flipped) {
  _Alignas(8) unsigned char memory[512];
  size_t bytes = ob_message_bytes(&shape);
  make_message(memory);
  ob_message_seal(memory, &shape, &ob_codec_scalar);
  for (size_t bit = 0; bit < 8 * bytes; bit++) {
    flip_bit(memory, bit);
    cr_expect_eq(check_message(memory, bytes), ONEBIT_ERROR_MESSAGE, "bit %zu", bit);
    flip_bit(memory, bit);
  }
  cr_expect_eq(check_message(memory, bytes), ONEBIT_OK, "%s", onebit_last_error());
}

/* Computes the checksum as documented, one lane after another. */
static uint32_t checksum_by_lanes(const uint32_t *words, size_t count) {
  uint32_t sum = 0;
  for (size_t run = 0; run * OB_CHECK_RUN < count; run++)
    for (uint32_t l = 0; l < 64; l++) {
      uint32_t lane = (uint32_t)(64 * run + l + 1) * 0x9e3779b9u;
      size_t left = count - run * 1024, rounds = left > 1024 ? 16 : (left + 63) / 64;
      for (size_t i = 0; i < rounds; i++) {
        size_t at = run * 1024 + i * 64 + l;
        lane = (lane ^ (at < count ? words[at] : 0)) * 0x85ebca6bu;
        lane ^= lane >> 15;
      }
      lane = (lane ^ lane >> 16) * 0x85ebca6bu;
      lane = (lane ^ lane >> 13) * 0xc2b2ae35u;
      sum += lane ^ lane >> 16;
    }
  return sum;
}

Test(message, has_one_checksum_by_every_codec) {
  static const size_t counts[] = {0, 1, 2, 63, 64, 65, 127, 1023, 1024, 1025, 2048, 5000, 100003};
  uint32_t *words = random_words(100004, 7);
  for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
    for (size_t row = 0; ob_codec_row(row); row++) {
      const struct ob_codec *codec = ob_codec_row(row);
      if (ob_codec_usable(codec))
        for (size_t at = 0; at < 2; at++) /* includes addresses that are not aligned to vectors */
          cr_expect_eq(codec->checksum(words + at, counts[i]),
                       checksum_by_lanes(words + at, counts[i]), "%s, %zu words", codec->name,
                       counts[i]);
    }
  free(words);
}

/* Damages a long payload as a link or memory may damage it: flipped bits, bursts, and words or runs
 * that are zeroed, moved, or replaced by their neighbours. */
Test(message, shows_damage_of_a_long_payload) {
  enum { COUNT = 20000 };
  uint32_t *words = random_words(COUNT, 3), *damaged = malloc(COUNT * sizeof *damaged);
  const struct ob_codec *codec = ob_codec_row(0);
  cr_assert(damaged && ob_codec_find(NULL, &codec) == ONEBIT_OK);
  const uint32_t whole = codec->checksum(words, COUNT);
  for (size_t k = 0; k < 20000; k++) {
    const size_t from = k * 7919 % (COUNT - 4096), to = k * 104729 % (COUNT - 4096);
    memcpy(damaged, words, COUNT * sizeof *damaged);
    if (k % 4 == 0)
      flip_bit((unsigned char *)damaged, k * 7919 % (COUNT * 32));
    else if (k % 4 == 1)
      memset((unsigned char *)(damaged + from) + k % 5, k % 3 ? 0 : 0xff, 1 + k % 4096);
    else if (k % 4 == 2)
      memmove(damaged + from, words + from + 1, (1 + k % 4095) * sizeof *words);
    else
      for (size_t two = 0; two < 2; two++) /* flips the highest bits of two words */
        damaged[two ? from : to + 2048] ^= 0x80000000u;
    cr_expect(codec->checksum(damaged, COUNT) != whole ||
                  memcmp(damaged, words, COUNT * sizeof *words) == 0,
              "damage %zu is not seen", k);
  }
  free(words);
  free(damaged);
}

/* Tests a layout of pieces of awkward sizes. Each element must be in exactly one block, at exactly
 * one position. */
Test(layout, holds_every_element_once) {
  static const size_t sizes[] = {0, 1, 31, 0, 0, 32, 33, 256, 257, 4096, 0, 5000, 0};
  struct ob_layout layout;
  cr_assert_eq(ob_layout_create(&layout, 256, 13, sizes, NULL), ONEBIT_OK);
  size_t piece = 0, elements = 0, words = 0;
  for (size_t b = 0; b < layout.blocks; b++) {
    struct ob_block block = ob_layout_block(&layout, b, &piece);
    size_t from_scratch = 0;
    struct ob_block again = ob_layout_block(&layout, b, &from_scratch);
    cr_expect(block.piece == again.piece && block.word == again.word);
    cr_expect_eq(block.word, words, "block %zu at word %zu, not %zu", b, block.word, words);
    cr_expect_eq(ob_layout_elements_before(&layout, b), elements);
    cr_expect_eq(ob_layout_first_block_from(&layout, block.word), b);
    cr_expect(block.offset + block.count <= sizes[block.piece] && block.count > 0);
    words += (block.count + 31) / 32;
    elements += block.count;
  }
  cr_expect_eq(words, layout.words);
  cr_expect_eq(elements, layout.elements);
  cr_expect_eq(ob_layout_first_block_from(&layout, words), layout.blocks);
  cr_expect_eq(ob_layout_word(&layout, layout.blocks), words);
  ob_layout_destroy(&layout);
}

Test(layout, of_nothing_is_empty) {
  struct ob_layout layout;
  cr_assert_eq(ob_layout_create(&layout, 2048, 0, NULL, NULL), ONEBIT_OK);
  cr_expect(layout.blocks == 0 && layout.words == 0 && layout.elements == 0);
  cr_expect_eq(ob_layout_first_block_from(&layout, 0), 0);
  ob_layout_destroy(&layout);
}

Test(layout, knows_what_is_padding) {
  const size_t counts[] = {24, 24}, valid[] = {24, 2};
  struct ob_layout layout;
  size_t piece = 0;
  cr_assert_eq(ob_layout_create(&layout, 2048, 2, counts, valid), ONEBIT_OK);
  cr_expect_eq(ob_layout_block(&layout, 0, &piece).valid, 24);
  cr_expect_eq(ob_layout_block(&layout, 1, &piece).valid, 2);
  cr_expect_eq(ob_layout_block(&layout, 1, &piece).count, 24);
  ob_layout_destroy(&layout);
}

/* The flags of a message must tell its receiver the width (docs/wire-format.md). */
Test(message, flags_say_the_width) {
  for (unsigned width = 1; width <= 8; width *= 2)
    cr_expect_eq(ob_flags_width(ob_payload_flags(false, false, width)), width, "%u bits: flags %u",
                 width, ob_payload_flags(false, false, width));
}
