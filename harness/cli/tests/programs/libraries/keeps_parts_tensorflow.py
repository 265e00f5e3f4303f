# Adds squares in parts. After an out-of-memory error it adds the part in another way. Its mistake: the list of failed parts keeps a tensor of each, so
# every error costs memory until the end.
import tensorflow as tf

total, failed = tf.zeros(()), []
for part in range(4):
    values = tf.fill((16 << 20,), float(part))
    try:
        total += tf.reduce_sum(tf.square(values))
    except tf.errors.ResourceExhaustedError:
        failed.append((part, values))
        total += tf.tensordot(values, values, 1)
    del values
print("parts", part + 1, "failed", len(failed))
