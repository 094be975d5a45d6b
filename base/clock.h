/* The clock that durations are taken from. */
#ifndef OB_BASE_CLOCK_H
#define OB_BASE_CLOCK_H

/* Seconds since some moment in the past; never goes back. Some 20 nanoseconds a call. */
double ob_seconds(void);

#endif
