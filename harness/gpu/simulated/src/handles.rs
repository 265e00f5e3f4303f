use crate::code::Code;

/// The difference of two handles. Real handles are aligned addresses too.
const STEP: usize = 16;
/// Numbers per device.
const PER_DEVICE_BITS: u32 = 32;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Handles {
    first: usize,
}

impl Handles {
    pub(crate) const fn starting_at(first: usize) -> Self {
        Self { first }
    }

    pub(crate) const fn handle(self, number: usize) -> usize {
        self.first + number * STEP
    }

    /// The number of a handle.
    pub(crate) fn number(self, handle: usize) -> Result<usize, Code> {
        let offset = handle
            .checked_sub(self.first)
            .filter(|offset| offset.is_multiple_of(STEP));
        offset
            .map(|offset| offset / STEP)
            .ok_or(Code::InvalidHandle)
    }

    /// The handle of an object that a device numbers.
    pub(crate) const fn on_device(self, device: usize, number: u32) -> usize {
        self.handle((device << PER_DEVICE_BITS) + number as usize + 1)
    }

    pub(crate) fn device_and_number(self, handle: usize) -> Result<(usize, u32), Code> {
        let number = self.number(handle)?;
        let on_device = u32::try_from(number & ((1 << PER_DEVICE_BITS) - 1))
            .ok()
            .and_then(|number| number.checked_sub(1));
        Ok((
            number >> PER_DEVICE_BITS,
            on_device.ok_or(Code::InvalidHandle)?,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAMS: Handles = Handles::starting_at(1 << 44);

    #[test]
    fn a_handle_leads_to_its_device_and_number() {
        for (device, number) in [(0, 0), (0, 7), (3, 0), (15, u32::MAX - 1)] {
            assert_eq!(
                STREAMS.device_and_number(STREAMS.on_device(device, number)),
                Ok((device, number))
            );
        }
        assert_eq!(STREAMS.number(STREAMS.handle(5)), Ok(5));
    }

    #[test]
    fn other_addresses_are_not_handles() {
        for other in [0, 77, STREAMS.first - 16, STREAMS.first + 3] {
            assert_eq!(STREAMS.number(other), Err(Code::InvalidHandle));
        }
        assert_eq!(
            STREAMS.device_and_number(STREAMS.first),
            Err(Code::InvalidHandle)
        );
    }
}
