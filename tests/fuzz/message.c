/*
 * A fuzzer for the decoder of messages (libFuzzer). The first bytes of the input choose the message
 * that the receiver expects; the rest is the message that arrived. The check must not read past the
 * end of the message. Decoding an accepted message must stay within the receiver's buffers. The
 * address and undefined-behaviour sanitizers report violations.
 */
#include "base/error.h"
#include "compression/blocks.h"
#include "tests/fuzz/fuzz.h"

struct receiver {
  struct ob_layout layout;
  struct ob_work work;
  struct ob_message_shape shape;
  struct ob_message_call expected;
};

static const unsigned widths[] = {1, 2, 4, 8};

/* Makes a layout of one tensor. The message covers the second half of the layout, like a server's
 * message. Only messages of signs can have one scale for all blocks. */
static int receiver_create(struct receiver *receiver, const uint8_t *choice) {
  size_t count = (size_t)choice[0] * 37 + choice[1], block = 32u << (choice[2] & 3);
  if (ob_layout_create(&receiver->layout, block, 1, &count, NULL) != ONEBIT_OK)
    return 0;
  size_t first = receiver->layout.blocks / 2;
  const unsigned width = widths[choice[2] >> 5 & 3];
  receiver->shape = (struct ob_message_shape){.first = first,
                                              .blocks = receiver->layout.blocks - first,
                                              .words = receiver->layout.words -
                                                       ob_layout_word(&receiver->layout, first),
                                              .width = width,
                                              .one_scale = width == 1 && choice[2] & 4,
                                              .dense = choice[2] & 8,
                                              .half = (choice[2] & 24) == 24};
  receiver->work = (struct ob_work){.codec = ob_codec_row(choice[3] >> 4 & 3),
                                    .layout = &receiver->layout,
                                    .output_dtype = (onebit_dtype_t)(choice[3] / 2 % 3),
                                    .one_scale = receiver->shape.one_scale,
                                    .half = receiver->shape.half,
                                    .bounded = receiver->shape.half,
                                    .threads = 1};
  if (receiver->shape.half) /* gives work.dtype the 16-bit type of the buffers */
    receiver->work.dtype = receiver->work.output_dtype =
        receiver->work.output_dtype == ONEBIT_FLOAT16 ? ONEBIT_FLOAT16 : ONEBIT_BFLOAT16;
  if (!receiver->work.codec || !ob_codec_usable(receiver->work.codec))
    receiver->work.codec = &ob_codec_scalar;
  receiver->expected = (struct ob_message_call){OB_MESSAGE_WORKER, choice[4], count, 0};
  return ob_work_create(&receiver->work, 2, 2) == ONEBIT_OK;
}

/* Corrects header fields that random input would seldom get right, so that the fuzzer reaches the
 * code after their checks. The checksum is corrected last, because it covers the other fields. */
static void correct_message(struct receiver *receiver, unsigned char *message, size_t bytes,
                            int what) {
  struct ob_header header;
  if (bytes < sizeof header)
    return;
  memcpy(&header, message, sizeof header);
  if (what & 1)
    header.magic = OB_MESSAGE_MAGIC;
  if (what & 2)
    header.version = OB_MESSAGE_VERSION;
  if (what & 4)
    header.kind = OB_MESSAGE_WORKER;
  if (what & 8)
    header.sequence = receiver->expected.sequence;
  if (what & 16)
    header.elements = receiver->expected.elements;
  if (what & 32)
    header.block = receiver->shape.first;
  if (what & 64)
    header.flags = (uint16_t)ob_payload_flags(receiver->shape.dense, receiver->shape.half,
                                              receiver->shape.width);
  memcpy(message, &header, sizeof header);
}

/* Checks the header fields that a receiver computes with: each must be valid and must equal the
 * expected value. */
static void check_view(const struct receiver *receiver, const struct ob_view *view) {
  const struct ob_message_shape *shape = &receiver->shape;
  FUZZ_CHECK((view->header->flags & OB_PAYLOAD_FLAGS) ==
             ob_payload_flags(shape->dense, shape->half, shape->width));
  for (size_t i = 0; i < ob_message_scales(shape); i++)
    FUZZ_CHECK(ob_scale_is_sound(view->scales[i]));
}

static void decode_message(struct receiver *receiver, unsigned char *message) {
  struct ob_view view = ob_message_view(message, &receiver->shape), both[2] = {view, view};
  check_view(receiver, &view);
  size_t bytes = receiver->layout.elements * ob_dtype_size(receiver->work.output_dtype);
  void *output = malloc(bytes ? bytes : 1);
  void *const outputs[1] = {output};
  if (receiver->shape.dense) {
    ob_convert_blocks(&receiver->work, &view, &receiver->shape, outputs);
    if (receiver->shape.half)
      ob_average_blocks(&receiver->work, both, 1, &receiver->shape, outputs);
  } else {
    ob_store_blocks(&receiver->work, &view, &receiver->shape, outputs);
    ob_sum_blocks(&receiver->work, both, &receiver->shape, outputs);
  }
  free(output);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  enum { choices = 7 };
  if (size < choices)
    return 0;
  struct receiver receiver = {0};
  size_t bytes = size - choices;
  unsigned char *message = fuzz_copy(data + choices, bytes, 0);
  if (receiver_create(&receiver, data)) {
    correct_message(&receiver, message, bytes, data[5]);
    if (data[6] & 1) { /* give many messages the expected length */
      unsigned char *right = realloc(message, ob_message_bytes(&receiver.shape));
      size_t wanted = ob_message_bytes(&receiver.shape);
      if (right && wanted > bytes)
        memset(right + bytes, data[6], wanted - bytes);
      message = right ? right : message;
      bytes = right ? wanted : bytes;
    }
    if (bytes == ob_message_bytes(&receiver.shape) && (data[6] & 2)) /* seal it with a correct
                                                                      * checksum */
      ob_message_seal(message, &receiver.shape, receiver.work.codec);
    if (ob_message_check(message, bytes, &receiver.shape, &receiver.expected,
                         receiver.work.codec) == ONEBIT_OK)
      decode_message(&receiver, message);
  }
  ob_work_destroy(&receiver.work);
  ob_layout_destroy(&receiver.layout);
  free(message);
  return 0;
}
