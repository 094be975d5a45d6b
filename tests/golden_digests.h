/* The digests of golden_cases.c: `codec_digest CODEC` prints these lines, with any codec. Recorded
 * with wire format 3. */
#ifndef ONEBIT_TESTS_GOLDEN_DIGESTS_H
#define ONEBIT_TESTS_GOLDEN_DIGESTS_H

#include "tests/golden_cases.h"

/* clang-format off */
static const struct golden golden_digests[] = {
    {"1 bit, rms, float32", 0xeb827d8469c8f48c, 0xde60ed6c4b596986, 0x80719bca9f01d63d},
    {"1 bit, mean, float32", 0x8f2ecb7fa87f48a9, 0x97c0ce380e23fbe9, 0xb5c749cac282bd98},
    {"2 bits, rms, float32", 0x403b6d7400c9fbd8, 0x6d2a8ca98c791fb1, 0x68fe84b17c9ae2f9},
    {"2 bits, largest, float32", 0x3c8341c25a480f8c, 0xfa028625477acd44, 0x2718226abab4f0b3},
    {"4 bits, rms, float32", 0xb0426b0d67ab43a0, 0x7eb0f00d45ac10b5, 0x5f996717e794c0b0},
    {"4 bits, largest, float32", 0x109f118b6ecedc37, 0xba8795ccbc3ef41f, 0x0d2390c66386ed93},
    {"8 bits, rms, float32", 0x45570d418486d92f, 0x11a487878e8a12e0, 0x3fa1994c6ba09cd1},
    {"8 bits, largest, float32", 0x45570d418486d92f, 0x11a487878e8a12e0, 0x3fa1994c6ba09cd1},
    {"1 bit, rms, bfloat16", 0x491bf4391d5e5158, 0x3fa68a8fa6440df4, 0x36948d8e9cd47613},
    {"1 bit, mean, bfloat16", 0x2cf5a139a34e796e, 0x5edb634e51f7a66c, 0xddf7ea8d76d70057},
    {"2 bits, rms, bfloat16", 0x9a55436a50e18067, 0x8debd783f71079dc, 0xbeaf81b190056714},
    {"2 bits, largest, bfloat16", 0xc0def66dec68dfe5, 0xcbd13142bcfe44a6, 0xd8354cc50a65b74c},
    {"4 bits, rms, bfloat16", 0xcdb9ae224483c1b3, 0x63eed6a7c2715b33, 0x7e98a3e820b728b1},
    {"4 bits, largest, bfloat16", 0x7f573432947de0f2, 0x402232486509290d, 0xf69b8358cb4f675d},
    {"8 bits, rms, bfloat16", 0x46166ffde7b14fde, 0x9de1ba1db4f6a609, 0x2909c11d0ad21a32},
    {"8 bits, largest, bfloat16", 0x46166ffde7b14fde, 0x9de1ba1db4f6a609, 0x2909c11d0ad21a32},
    {"1 bit, rms, float16", 0xdd9bc46bfd572b0c, 0x1affb282b6a67e30, 0x7d15ae507cf970d1},
    {"1 bit, mean, float16", 0x4381a70193c90e30, 0x13a15194b5a7fefd, 0x4ccac6040ad99532},
    {"2 bits, rms, float16", 0x264dbd100919db08, 0xb4ad6f35a123f2b1, 0xbf79c7ee379e7ca9},
    {"2 bits, largest, float16", 0xb37a0b8c3afed01f, 0xea4388aceef999b2, 0x5113141823680199},
    {"4 bits, rms, float16", 0x475c36168f6f3d0b, 0xcddd2e805d8e826c, 0xd141c4c1264a5d2d},
    {"4 bits, largest, float16", 0x1bbad32c38ee9ad8, 0xa7154db49427d0ac, 0xfc54178b2fc59466},
    {"8 bits, rms, float16", 0x2272c64ac16e3c40, 0xd77096154ca75d22, 0x1367d4dbc583f4a4},
    {"8 bits, largest, float16", 0x2272c64ac16e3c40, 0xd77096154ca75d22, 0x1367d4dbc583f4a4},
};
/* clang-format on */

#endif
