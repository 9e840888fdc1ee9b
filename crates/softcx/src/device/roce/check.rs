//! The invariant CRC (IBTA 7.8.1, annex A17.3.3): the CRC-32 of Ethernet over the packet with those fields masked that a router may change.

/// One CRC of a packet, as its bytes stand on the wire when stored in little-endian order. `pseudo` are the masked headers, `rest` all that
/// follows them up to the CRC.
pub(super) fn invariant_crc(pseudo: &[u8], rest: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    // Where InfiniBand has its LRH, masked.
    hasher.update(&[0xff; 8]);
    hasher.update(pseudo);
    hasher.update(rest);
    hasher.finalize()
}

/// The polynomial of CRC-32, reflected: bit 31 is the coefficient of `x^0`.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// `a * b` modulo the polynomial, reflected.
const fn product(mut a: u32, mut b: u32) -> u32 {
    let mut sum = 0;
    while a != 0 {
        if a & 0x8000_0000 != 0 {
            sum ^= b;
        }
        a <<= 1;
        b = (b >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(b & 1));
    }
    sum
}

/// `x^-8`, and its squares: what takes back 1, 2, 4, ... bytes of zeros.
const BACK: [u32; 16] = {
    // x^-1: the polynomial without its x^0, divided by x.
    let inverse = {
        // x * y = 1 with y = (P - 1) / x. Reflected, a division by x is a shift to the left, and P's x^32 becomes x^31.
        (POLYNOMIAL << 1) | 1
    };
    let mut byte = 0x8000_0000;
    let mut bit = 0;
    while bit < 8 {
        byte = product(byte, inverse);
        bit += 1;
    }
    let mut powers = [0; 16];
    let mut at = 0;
    while at < powers.len() {
        powers[at] = byte;
        byte = product(byte, byte);
        at += 1;
    }
    powers
};

/// `x^8`, and its squares: what adds 1, 2, 4, ... bytes of zeros.
const AHEAD: [u32; 16] = {
    let mut powers = [0; 16];
    let (mut power, mut at) = (0x0080_0000, 0);
    while at < powers.len() {
        powers[at] = power;
        power = product(power, power);
        at += 1;
    }
    powers
};

/// What a difference in two bytes, as they stand on the wire, makes of the CRC. `behind` is the number of bytes from the first of the two to the
/// end.
pub(super) fn effect_of_bytes(bytes: [u8; 2], behind: usize) -> u32 {
    let difference = u32::from_le_bytes([bytes[0], bytes[1], 0, 0]);
    let powers = AHEAD.iter().enumerate();
    powers
        .filter(|(bit, _)| behind >> bit & 1 != 0)
        .fold(difference, |crc, (_, power)| product(crc, *power))
}

/// The two bytes, as they stand on the wire, that differ from those that a CRC was taken over, if these two alone explain the difference of two
/// CRCs. `behind` is the number of bytes from the first of the two to the end.
pub(super) fn explaining_bytes(difference: u32, behind: usize) -> Option<[u8; 2]> {
    let mut at_the_place = difference;
    for (bit, power) in BACK.iter().enumerate() {
        if behind >> bit & 1 != 0 {
            at_the_place = product(at_the_place, *power);
        }
    }
    let [low, high, 0, 0] = at_the_place.to_le_bytes() else {
        return None;
    };
    Some([low, high])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_two_bytes_is_found_by_its_effect_on_the_crc() {
        let crc = |bytes: &[u8]| invariant_crc(bytes, &[]);
        for len in [2, 3, 60, 1100, 4170] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + 3) as u8).collect();
            for at in [0, (len - 2) / 2, len - 2] {
                let mut changed = bytes.clone();
                changed[at] ^= 0x12;
                changed[at + 1] ^= 0xf7;
                let difference = crc(&bytes) ^ crc(&changed);
                assert_eq!(
                    explaining_bytes(difference, len - at),
                    Some([0x12, 0xf7]),
                    "{len} {at}"
                );
                assert_eq!(effect_of_bytes([0x12, 0xf7], len - at), difference);
            }
        }
        assert_eq!(explaining_bytes(0, 99), Some([0, 0]));
        // Three bytes.
        let difference = crc(&[0; 40]) ^ crc(&[&[1, 0, 1][..], &[0; 37]].concat());
        assert_eq!(explaining_bytes(difference, 40), None);
    }
}
